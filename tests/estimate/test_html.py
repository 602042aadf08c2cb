"""The page of a planned step: complete, offline and small."""

from __future__ import annotations

import re
from dataclasses import replace
from html.parser import HTMLParser
from typing import Any
from xml.dom import minidom

import pytest
import torch
from support.models import Model
from support.translations import config_of

from composer_fsdp2 import estimate_step, plan_sharding
from composer_fsdp2.config.findings import Finding, Outcome
from composer_fsdp2.estimate.bounds import GPUS, step_bounds
from composer_fsdp2.estimate.html import drawn_samples, plan_page
from composer_fsdp2.estimate.optimizers import optimizer_state
from composer_fsdp2.estimate.planned_step import Memory, PlannedStep
from composer_fsdp2.estimate.step import Kind

pytestmark = pytest.mark.any_torch


def planned(
    num_blocks: int = 2, num_microbatches: int = 2, memory_bytes: int | None = 2**34, **config: Any
) -> PlannedStep:
    """A step of a small model on many ranks, with everything that a page may show."""
    with torch.device("meta"):
        model = Model(num_blocks=num_blocks, width=64)
    plan = plan_sharding(model, config_of(config, device="cuda", world_size=16)).resolve(16)
    optimizer = optimizer_state("AdamW")
    estimate = estimate_step(
        plan, None, world_size=16, optimizer=optimizer, num_microbatches=num_microbatches, gpus_per_node=8
    )
    finding = Finding(key="a_key", value="<b>", outcome=Outcome.NEEDS_DECISION, reason="a & b", where="run.yaml:3")
    return PlannedStep(
        source="runs/<script>alert(1)</script>.yaml",
        plan=plan,
        estimate=estimate,
        trace=None,
        optimizer="AdamW",
        precision="fp32",
        world_size=16,
        gpus_per_node=8,
        microbatch_size=1,
        num_microbatches=num_microbatches,
        sequence_length=32,
        findings=(finding,),
        memory=None if memory_bytes is None else Memory(given_bytes=memory_bytes),
        bounds=step_bounds(estimate, None, GPUS["h100"]),
    )


class Addresses(HTMLParser):
    """Everything that a browser would load or run."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        names = ("src", "srcset", "href", "xlink:href", "action", "data", "poster", "background")
        self.found += [f"{tag} {name}={value}" for name, value in attrs if name in names and value != "data:,"]
        self.found += [f"{tag} {name}" for name, _ in attrs if name.startswith("on")]
        if tag in ("script", "iframe", "object", "embed", "base"):
            self.found.append(tag)


def test_the_page_is_whole_and_asks_for_nothing_from_outside():
    """A cluster's login node has no network, and a forwarded page must not contact a server. A file's name or a
    finding's value must not be parsed as markup."""
    bare = replace(planned(memory_bytes=None), bounds=None, findings=())
    for step in (planned(), planned(num_blocks=300), bare):
        page = plan_page(step, "1. a <b> & c")
        minidom.parseString(page.removeprefix("<!DOCTYPE html>\n"))
        reader = Addresses()
        reader.feed(page)
        assert reader.found == []
        assert not re.search(r"(?i)https?:|//[a-z]|url\(|@import|\d(?:nan|inf)|>(?:nan|inf|None)<", page)
        assert "runs/&lt;script&gt;alert(1)" in page and "<pre>1. a &lt;b&gt; &amp; c</pre>" in page
        assert "prefers-color-scheme:dark" in page


def test_the_page_says_what_the_plan_says():
    """A reader of the page alone sees the peak, its parts, each collective, the open decisions, and the model."""
    step = planned()
    page = plan_page(step)
    [document] = minidom.parseString(page.removeprefix("<!DOCTYPE html>\n")).getElementsByTagName("body")
    text = " ".join(node.data for node in texts(document))
    for kind in Kind:
        assert (f"</i>{kind.value}</td>" in page) == bool(step.most_of(kind)), kind
    for words in (
        "all_gather",
        "reduce_scatter",
        "is left for what is not modelled",
        "a_key: '<b>'",
    ):
        assert words in text
    for unknown in step.bounds.unknown if step.bounds else ():
        assert unknown in text
    assert "Activations are not counted" in text
    assert "decoder.blocks.*" in text
    of_many = plan_page(planned(num_microbatches=12))
    assert "on each rank 12 microbatches of 1 row of 32 tokens a step" in of_many
    assert all(f">{number}</text>" in of_many for number in range(1, 13))  # where no phase's name has the space
    assert "does not fit" in plan_page(planned(memory_bytes=2**31)) and "to spare" in page


def texts(node: minidom.Node) -> list[minidom.Text]:
    if isinstance(node, minidom.Text):
        return [node]
    return [found for child in node.childNodes for found in texts(child)]


def test_a_large_run_stays_small_and_keeps_its_peak():
    """127 units in 8 microbatches are about ten thousand moments: a page with all of them is too large for mail, and
    one with every twentieth would not show the moment that runs out of memory."""
    step = planned(num_blocks=126, num_microbatches=8)
    timeline = step.estimate.timeline
    assert len(step.plan.units) == 127 and len(timeline) > 5000
    drawn = drawn_samples(timeline)
    assert len(drawn) <= 480 and max(each.total_bytes for each in drawn) == step.estimate.peak_bytes
    lone = [replace(sample, bytes_by_kind=(1, *[0] * (len(Kind) - 1))) for sample in timeline]
    for place in (0, 1, len(lone) // 2, len(lone) - 1):
        one_peak = [*lone[:place], replace(lone[place], bytes_by_kind=(2, *[0] * (len(Kind) - 1))), *lone[place + 1 :]]
        assert max(each.total_bytes for each in drawn_samples(one_peak)) == 2, place
    assert len(plan_page(step).encode()) < 2**20
