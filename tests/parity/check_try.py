import time
from parity.harness import *


def check(run):
    t = time.time()
    a = train(run, Sharding.FSDP1)
    t1 = time.time()
    b = train(run, Sharding.FSDP2)
    t2 = time.time()
    assert a.units == b.units and a.checkpointed == b.checkpointed and a.groups == b.groups, (
        a.units,
        b.units,
        a.checkpointed,
        b.checkpointed,
        a.groups,
        b.groups,
    )
    if a.roots != b.roots:
        print("ROOTS", a.roots, b.roots)
    return (
        f"{t1 - t:.2f} {t2 - t1:.2f}",
        difference(b, a),
        a.mean_losses[0],
        a.mean_losses[-1],
        min(a.norms),
        max(a.norms),
        a.roots == b.roots,
        b.clip_norms[:2],
    )
