"""Settings of rotary positions: base, rotated share of a head, scaling for long contexts."""

import dataclasses
import math

from sparse_dataflow.core.config.settings import MOST_SIZE, Readable, between, positive, setting
from sparse_dataflow.files.errors import UserError

SCALINGS = ("llama3", "linear", "dynamic", "yarn", "longrope")

USED = {
    "llama3": ("rotary_factor", "rotary_low", "rotary_high", "rotary_length"),
    "linear": ("rotary_factor",),
    "dynamic": ("rotary_factor",),
    "yarn": (
        "rotary_factor",
        "rotary_low",
        "rotary_high",
        "rotary_length",
        "rotary_attention",
    ),
    "longrope": ("rotary_factor", "rotary_length", "rotary_attention", "rotary_factors"),
}
"""Scaling -> the settings that it reads."""

WHOLE = ("yarn", "longrope")
"""Scalings that count pairs of features, so that an odd share is not legal."""


@dataclasses.dataclass(frozen=True, kw_only=True, repr=False)
class RotarySettings(Readable):
    """The rotary positions of a `ModelConfig`.

    Attributes:
      rotary_scaling: how the frequencies change with rotary_factor; names are those of
        `transformers`.  "llama3": wavelengths above rotary_length / rotary_low are multiplied by
        the factor, those below rotary_length / rotary_high are unchanged, and between them the
        frequency is interpolated.  "yarn" (arXiv 2309.00071): as llama3, interpolated over the
        index of the frequency, and the rotations are scaled.  "linear": all wavelengths are
        multiplied.  "dynamic" and "longrope" (arXiv 2402.13753) change with the length of a
        context; here contexts are no longer than max_len and rotary_length, up to which dynamic
        changes nothing and longrope divides frequencies by rotary_factors.
    """

    rotary_base: float = setting(10_000.0, "Base of the rotary frequencies.", legal=positive(1e12))
    rotary_local_base: float = setting(
        0.0,
        "Base in layers with model.window, which then have no scaling; 0 is model.rotary_base.",
        legal=between(0, 1e12),
    )
    rotary_share: float = setting(
        1.0, "Share of a head's features, the first, that are rotated.", legal=positive(1)
    )
    rotary_scaling: str = setting(
        "llama3", "Scaling of rotary wavelengths by model.rotary_factor.", choices=SCALINGS
    )
    rotary_factor: float = setting(
        1.0, "Scaling factor of long rotary wavelengths; 1 is none.", legal=between(1, MOST_SIZE)
    )
    rotary_low: float = setting(
        1.0, "low_freq_factor of llama3, beta_slow of yarn.", legal=positive(MOST_SIZE)
    )
    rotary_high: float = setting(
        4.0, "high_freq_factor of llama3, beta_fast of yarn.", legal=positive(MOST_SIZE)
    )
    rotary_length: int = setting(
        8192,
        "original_max_position_embeddings of llama3, yarn and longrope, in tokens.",
        legal=between(1, MOST_SIZE),
    )
    rotary_attention: float = setting(
        0.0,
        "Scale of rotated queries and of keys with yarn and longrope; 0 is that of the paper.",
        legal=between(0, MOST_SIZE),
    )
    rotary_factors: tuple[float, ...] = setting(
        (), "Divisors of longrope's frequencies, its short_factor.", legal=positive(MOST_SIZE)
    )

    def rotated(self, head_width: int) -> int:
        """Returns how many features of a head are rotated, the first ones.

        As in `transformers`, an odd share is rounded up, and its frequencies are those of the odd
        width.
        """
        return 2 * math.ceil(int(head_width * self.rotary_share) / 2)

    def check_rotary(self, head_width: int) -> None:
        """Raises UserError if the settings do not fit the width of a head or each other."""
        width = self.rotated(head_width)
        share, whole = int(head_width * self.rotary_share), self.rotary_scaling in WHOLE
        if not 0 < width <= head_width or (whole and share % 2):
            raise UserError(
                f"rotary positions need an even number of rotated features, and {share} of "
                f"{head_width} are; legal: fewer heads, another model.head_dim or "
                "model.rotary_share, or learned positions."
            )
        factors = width // 2 if self.rotary_scaling == "longrope" else 0
        if len(self.rotary_factors) != factors:
            raise UserError(
                f"model.rotary_factors has {len(self.rotary_factors)} numbers with "
                f"model.rotary_scaling={self.rotary_scaling} and {width} rotated features; legal: "
                f"{factors}."
            )
