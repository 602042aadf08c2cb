"""Compare the training of one file on FSDP1 and on FSDP2: run both, judge the differences, and write a report."""
