"""Where keys stand in a section of Hugging Face's, and with which prefix."""

# The groups of the table, by the mapping in a section that has their keys; those of one group lie beside it.
SETTINGS, DEGREES, DEEPSPEED = MAPPINGS = ("fsdp_config", "parallelism_config", "deepspeed_config")
BESIDE = "beside fsdp_config"
PREFIX, DEGREES_PREFIX = "fsdp_", "parallelism_config_"
# Arguments of a Trainer from the time before fsdp_config: their names have the prefix, and are read.
OLD_SIBLINGS = ("fsdp_transformer_layer_cls_to_wrap", "fsdp_min_num_params")
# What accelerate reads of a configuration file, which it refuses as a whole for any other name.
OF_ACCELERATES_FILE = frozenset(
    """
    compute_environment distributed_type mixed_precision use_cpu debug num_processes machine_rank num_machines gpu_ids
    main_process_ip main_process_port rdzv_backend same_network main_training_function enable_cpu_affinity fp8_config
    deepspeed_config fsdp_config megatron_lm_config ipex_config mpirun_config downcast_bf16 tpu_name tpu_zone
    tpu_use_cluster tpu_use_sudo command_file commands tpu_vm tpu_env dynamo_config fp16 dynamo_backend
    parallelism_config
    """.split()  # noqa: SIM905
)
