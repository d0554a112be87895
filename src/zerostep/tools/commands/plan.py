"""`zerostep plan`: predict memory per rank, bytes sent and step time of a model and an optimizer, on one machine."""

from __future__ import annotations

import json
import math
import sys
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.console import Console

from zerostep.plan.layout_planner import Settings
from zerostep.tools.errors import PlanError
from zerostep.tools.planner import report
from zerostep.tools.planner.comparison import Comparison, Request, compare_largest
from zerostep.tools.planner.forecast import Compute, Network
from zerostep.tools.planner.picture import check_path, draw
from zerostep.tools.planner.recipe import Recipe, Rule, dtype_named, optimizer_class, parse_options
from zerostep.tools.planner.sources import Source, load
from zerostep.tools.planner.tensor_parallel import load_divided

_WIDE = 160
EPILOG = """\b
Examples:
  zerostep plan --model llama-7b --ranks 8 --dtype bf16 --master-dtype fp32
  zerostep plan --model model.safetensors.index.json --plot memory.svg
  zerostep plan --model my_package:make_model --optimizer SGD \\
      --option momentum=0.9
  zerostep plan --model llama-70b --ranks 64 --tp 8 --dtype bf16
  zerostep plan --model my_package:make_model --tp 2 \\
      --tp-plan my_package:parallelize
  zerostep plan --model gpt2-xl --matrix-optimizer Muon --ranks 16
  zerostep plan --model llama-70b --mesh 64x64 --dtype bf16 --json \\
      --bandwidth 50 --flops 400e12 --tokens 8192
"""


class _Device(StrEnum):
    CUDA = "cuda"
    CPU = "cpu"


class _Partition(StrEnum):
    AUTO = "auto"
    ELEMENTS = "elements"
    PARAMETERS = "parameters"


class _Update(StrEnum):
    STEP = "step"
    BACKWARD = "backward"


class _Gather(StrEnum):
    STEP = "step"
    FORWARD = "forward"


_Model = Annotated[str, typer.Option(help="package.module:factory, a .safetensors file or index, or gpt2, gpt2-xl, llama-7b, llama-70b.", show_default=False)]  # fmt: skip  # noqa: E501
_Ranks = Annotated[int, typer.Option(help="How many ranks train; --mesh overrides it.")]
_Mesh = Annotated[str | None, typer.Option(metavar="RxS", help="R copies, each divided among S ranks.")]
_Tp = Annotated[int, typer.Option("--tp", help="How many of the ranks share one copy of the model by tensor parallelism; those of --mesh do not count them.")]  # fmt: skip  # noqa: E501
_TpPlan = Annotated[str | None, typer.Option(metavar="MODULE:NAME", help="What divides the model: a function of the model and the mesh, or a plan for parallelize_module.")]  # fmt: skip  # noqa: E501
_Optimizer = Annotated[str, typer.Option(help="A class of torch.optim, or package.module:Class.")]
_Option = Annotated[list[str] | None, typer.Option("--option", metavar="NAME=VALUE", help="An option of the optimizer; may be repeated.")]  # fmt: skip  # noqa: E501
_Matrix = Annotated[str | None, typer.Option(help="Another class for the matrices of numbered blocks, such as Muon.")]
_MatrixOption = Annotated[list[str] | None, typer.Option("--matrix-option", metavar="NAME=VALUE", help="An option of that class.")]  # fmt: skip  # noqa: E501
_Dtype = Annotated[str | None, typer.Option(help="The dtype of parameters; the model's own if not given.")]
_MasterDtype = Annotated[str | None, typer.Option(help="Keep masters in this dtype.")]
_ReduceDtype = Annotated[str | None, typer.Option(help="Sum gradients in this dtype.")]
_Cut = Annotated[_Partition, typer.Option(help="What ShardedOptimizer may divide among ranks.")]
_Sharding = Annotated[bool, typer.Option(help="Off: show ShardedOptimizer in DDP too, which keeps whole gradients.")]
_Views = Annotated[bool, typer.Option("--bucket-view", help="DDP has gradient_as_bucket_view=True.")]
_BucketMb = Annotated[float | None, typer.Option(help="The size of ShardedOptimizer's buckets in MiB.")]
_Place = Annotated[_Device, typer.Option(help="The device of the parameters.")]
_When = Annotated[_Gather, typer.Option(help="Where new parameters are waited for, in the forecast.")]
_Where = Annotated[_Update, typer.Option(help="Where ShardedOptimizer updates: backward keeps no gradients.")]
_Bandwidth = Annotated[float | None, typer.Option(help="GB/s that a rank sends: forecast the step time.")]
_Latency = Annotated[float, typer.Option(help="Microseconds that each message costs beside its bytes.")]
_Error = Annotated[float, typer.Option(help="Percent by which collectives may take less or more.")]
_Flops = Annotated[float | None, typer.Option(help="FLOP/s that a rank achieves, such as 400e12.")]
_Tokens = Annotated[int, typer.Option(help="Tokens of one rank's batch.")]
_Json = Annotated[bool, typer.Option("--json", help="Print JSON, in bytes and seconds.")]
_Plot = Annotated[Path | None, typer.Option(metavar="OUT.png|svg", help="Draw the table as stacked bars.")]


def plan(  # noqa: PLR0913
    model: _Model,
    ranks: _Ranks = 8,
    mesh: _Mesh = None,
    tp: _Tp = 1,
    tp_plan: _TpPlan = None,
    optimizer: _Optimizer = "AdamW",
    option: _Option = None,
    matrix_optimizer: _Matrix = None,
    matrix_option: _MatrixOption = None,
    dtype: _Dtype = None,
    master_dtype: _MasterDtype = None,
    reduce_dtype: _ReduceDtype = None,
    partition: _Cut = _Partition.AUTO,
    shard_gradients: _Sharding = True,
    bucket_view: _Views = False,
    bucket_mb: _BucketMb = None,
    device: _Place = _Device.CUDA,
    gather: _When = _Gather.STEP,
    update: _Where = _Update.STEP,
    bandwidth: _Bandwidth = None,
    latency: _Latency = 5.0,
    error: _Error = 20.0,
    flops: _Flops = None,
    tokens: _Tokens = 4096,
    as_json: _Json = False,
    plot: _Plot = None,
) -> int:
    """Show the memory of each rank, bytes on the wire and step times, before there are any ranks.

    The real optimizer class is run on tensors without memory, and the layout is the one that training would have. Plain
    DDP, whole-parameter sharding, ShardedOptimizer (ZeRO-2) and FSDP-style full sharding are shown side by side.
    """
    count, shards = _ranks_and_shards(ranks, mesh, tp)
    settings = Settings(
        partition=partition.value,
        gather=gather.value,
        update=update.value,
        master_dtype=dtype_named(master_dtype, "--master-dtype"),
        reduce_dtype=dtype_named(reduce_dtype, "--reduce-dtype"),
        bucket_mb=bucket_mb,
    )
    matrices = _rule(matrix_optimizer, matrix_option, "matrix-") if matrix_optimizer else None
    recipe, where = Recipe(_rule(optimizer, option), matrices), device.value
    requests = [
        Request(source, recipe, count, shards, settings, where, not shard_gradients, bucket_view, tp)
        for source in _sources(model, dtype_named(dtype, "--dtype"), tp, tp_plan)
    ]
    forecast_inputs = _forecast_inputs(bandwidth, latency, error, flops, tokens)
    if plot is not None:
        check_path(plot)
    comparison = compare_largest(requests)
    _show(comparison, forecast_inputs, as_json)
    if plot is not None:
        draw(comparison, plot)
    return 0


def _sources(model: str, dtype: torch.dtype | None, tp: int, tp_plan: str | None) -> list[Source]:
    """What the model leaves on each rank of tensor parallelism."""
    if tp == 1 and tp_plan is None:
        return [load(model, dtype)]
    return load_divided(model, dtype, tp, tp_plan)


def _ranks_and_shards(ranks: int, mesh: str | None, tp: int) -> tuple[int, int]:
    """The ranks that hold the same parameters, and how many of them divide one copy of their state."""
    if mesh is None:
        if tp < 1 or ranks % tp:
            raise PlanError(f"{ranks} ranks cannot be divided into groups of --tp {tp}: change --ranks or --tp")
        return ranks // tp, ranks // tp
    replicas, sign, shards = mesh.lower().partition("x")
    if not sign or not replicas.isdigit() or not shards.isdigit() or not int(replicas) * int(shards):
        raise PlanError(f"--mesh {mesh} is not RxS: write for example --mesh 8x64, 8 copies of 64 shards")
    return int(replicas) * int(shards), int(shards)


def _rule(name: str, options: list[str] | None, prefix: str = "") -> Rule:
    return Rule(optimizer_class(name, f"--{prefix}optimizer"), parse_options(options or [], f"--{prefix}option"))


def _forecast_inputs(
    bandwidth: float | None, latency: float, error: float, flops: float | None, tokens: int
) -> tuple[Compute, Network] | None:
    if bandwidth is None and flops is None:
        return None
    if bandwidth is None or flops is None:
        missing = "--bandwidth" if bandwidth is None else "--flops"
        raise PlanError(f"a forecast needs both --bandwidth and --flops: add {missing}")
    for name, value in (("--bandwidth", bandwidth), ("--flops", flops), ("--tokens", tokens)):
        if not 0 < value < math.inf:
            raise PlanError(f"{name} must be a positive number, not {value:g}")
    if not 0 <= latency < math.inf:
        raise PlanError(f"--latency must be zero or more microseconds, not {latency:g}")
    if not 0 <= error < 100:
        raise PlanError(f"--error must be at least 0 and less than 100 percent, not {error:g}")
    return Compute(flops, tokens), Network(bandwidth * 1e9, latency * 1e-6, error / 100)


def _show(comparison: Comparison, forecast_inputs: tuple[Compute, Network] | None, as_json: bool) -> None:
    times = None if forecast_inputs is None else report.forecast(comparison, *forecast_inputs)
    if as_json:
        sys.stdout.write(json.dumps(report.as_json(comparison, times), indent=2) + "\n")
        return
    plain = not Console().is_terminal
    console = Console(width=max(_WIDE, Console().width))  # better a long line than one that rich cuts
    console.print(report.as_text(comparison, times, plain), soft_wrap=True, highlight=False)
