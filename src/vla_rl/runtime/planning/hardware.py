"""Rates of GPUs and simulators: data with sources (hardware.yaml), for plans without a run."""

from __future__ import annotations

from functools import cache
from pathlib import Path

from attrs import field, frozen
from attrs import validators as v

from vla_rl.core.errors import UserError, did_you_mean
from vla_rl.core.paths import read_text
from vla_rl.core.spec.shipped_files import parse_file

FILE = Path(__file__).with_name("hardware.yaml")
LONGEST_FILE = 100_000
"""Characters."""
REACHED = {"product": 770 / 989, "traffic": 4.26 / 4.8}
"""Share of the published peak that the one measured card reached: products of matrices, and copies."""


@frozen(kw_only=True)
class GpuRates:
    """Rates of a GPU."""

    tflops: float = field(validator=v.gt(0))
    """Floating-point operations a second of a large bfloat16 product, in 10^12."""
    terabytes_per_s: float = field(validator=v.gt(0))
    """Bytes a second of a copy on the device, reading and writing, in 10^12."""
    gib: float = field(validator=v.gt(0))
    """Memory in GiB."""
    link_gb_per_s: float = field(validator=v.gt(0))
    """Bytes a second to another GPU, one direction, in 10^9."""
    fp8: bool = True
    """Whether it multiplies in FP8."""
    measured: bool = False
    """Rates that a card reached (`benchmarks/gpu.py`); else published peaks."""
    source: str = ""

    @property
    def product_flops_per_s(self) -> float:
        """Return the floating-point operations a second that a large product reaches."""
        return self.tflops * 1e12 * (1.0 if self.measured else REACHED["product"])

    @property
    def traffic_bytes_per_s(self) -> float:
        """Return the bytes a second that a copy reaches."""
        return self.terabytes_per_s * 1e12 * (1.0 if self.measured else REACHED["traffic"])

    @property
    def link_bytes_per_s(self) -> float:
        """Return the bytes a second to another GPU."""
        return self.link_gb_per_s * 1e9


@frozen(kw_only=True)
class CpuSimulation:
    """Costs of an env on one core."""

    step_s: float = field(validator=v.ge(0))
    """Seconds of an action."""
    image_s: float = field(default=0.0, validator=v.ge(0))
    """Seconds to draw an image on a CPU, once a chunk and camera."""
    gpu_image_s: float | None = field(default=None, validator=v.optional(v.ge(0)))
    """Seconds to draw an image on a GPU: a guess. Null: as on a CPU."""
    source: str = ""


@frozen(kw_only=True)
class GpuSimulation:
    """Costs of a batch of envs on a GPU."""

    fixed_s: float = field(validator=v.ge(0))
    """Seconds of an action of all envs of a worker."""
    pixel_s: float = field(validator=v.ge(0))
    """Further seconds for each pixel of their images."""
    source: str = ""


@frozen(kw_only=True)
class SimulatorRates:
    """What is known of a simulator without building it."""

    cpu: CpuSimulation | None = None
    gpu: GpuSimulation | None = None
    state_dim: int = 0
    action_dim: int = 7
    image: tuple[int, int] | None = None
    """Height and width of its images where its settings do not say them."""
    max_steps: dict[str, int] = field(factory=dict)
    """Suite -> step limit; `default` for all others."""
    simplevla_max_steps: int | None = None
    instruction: str = "do the task"
    """An instruction of typical length."""


@frozen(kw_only=True)
class Hardware:
    """Contents of the file."""

    gpus: dict[str, GpuRates]
    simulators: dict[str, SimulatorRates]


@cache
def read_hardware() -> Hardware:
    """Return the data of hardware.yaml."""
    return parse_file(read_text(FILE, LONGEST_FILE), FILE.name, Hardware)[0]


def gpu_rates(name: str) -> GpuRates:
    """Return the rates of a GPU by its name, or those in a YAML file of the same keys. Raises UserError."""
    gpus = read_hardware().gpus
    if name.lower() in gpus:
        return gpus[name.lower()]
    if name.endswith((".yaml", ".yml")):
        try:
            return parse_file(read_text(Path(name), LONGEST_FILE), name, GpuRates)[0]
        except UnicodeDecodeError as exc:
            raise UserError(f"--gpu {name} is not UTF-8 text ({exc.reason} at byte {exc.start})") from exc
        except OSError as exc:
            raise UserError(f"--gpu {name} cannot be read: {exc.strerror or exc}") from exc
    listed = ", ".join(gpus)
    raise UserError(
        f"no rates of a GPU {name!r} are known{did_you_mean(name, gpus)}\n  known: {listed}; or a YAML file"
    )
