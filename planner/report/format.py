"""Numbers and device sets as people read them. Pure text; every part of a report uses the same forms."""

from collections.abc import Iterable, Sequence

from realgraph.planner.plan.layout import Layout

GB = 1e9
AXES = ("dp", "tp", "pp")
RARE_AXES = ("cp", "ep")  # named only where one is above 1


WHOLE_STEP = "a whole step"  # the name of the period among the names of calls


def seconds_text(seconds: float) -> str:
    """Three significant digits: `1,204 s`, `67.3 s`, `0.104 s`, `68.4 ms`, `20.0 us`; `0 s`."""
    if seconds >= 0.1:
        return f"{rate_text(seconds)} s"
    if seconds >= 1e-3:
        return f"{rate_text(seconds * 1e3)} ms"
    return f"{rate_text(seconds * 1e6)} us" if seconds > 0 else "0 s"


def ratio_text(predicted: float, measured: float) -> str:
    """Predicted over measured: `0.92`; `inf` where nothing was measured of what takes time."""
    return f"{predicted / measured if measured > 0 else float('inf'):.2f}"


def rate_text(per_second: float) -> str:
    """Three significant digits, thousands in full: `7.68`, `41.8`, `1,190`."""
    return f"{per_second:,.0f}" if per_second >= 99.95 else f"{per_second:#.3g}"


def counted(number: int, noun: str) -> str:
    """`1 node`, `2,048 groups`."""
    return f"{number:,} {noun}{'s' * (number != 1)}"


def percent_text(share: float, digits: int = 0) -> str:
    """`96 %`; `0.2 %` with one digit."""
    return f"{share * 100:.{digits}f} %"


def gap_text(gap: float) -> str:
    """A small share that matters: `0 %`, `0.13 %`, `3.4 %`, `28 %`."""
    if abs(gap) < 5e-5:
        return "0 %"
    return percent_text(gap, 2 if gap < 0.01 else 1 if gap < 0.1 else 0)


def change_text(ratio: float) -> str:
    """`+14 %` for 1.14, `-3.2 %` for 0.968, `equal` for what rounds to nothing."""
    change = (ratio - 1) * 100
    if abs(change) < 0.05:
        return "equal"
    return f"{change:+.0f} %" if abs(change) >= 10 else f"{change:+.1f} %"


def bytes_text(nbytes: float) -> str:
    """`57.7 GB`, `131 MB`, `3.2 MB`. 10^9 bytes."""
    if nbytes >= 0.9995 * GB:
        return f"{nbytes / GB:,.1f} GB"
    return f"{nbytes / 1e6:.0f} MB" if nbytes >= 99.95e6 else f"{nbytes / 1e6:.1f} MB"


def count_text(n_params: float) -> str:
    """`8.03B`, `596M`, `18.1K`."""
    if n_params >= 999.5e6:
        return f"{n_params / 1e9:.3g}B"
    return f"{n_params / 1e6:.3g}M" if n_params >= 999.5e3 else f"{n_params / 1e3:.3g}K"


def dollars_text(usd: float) -> str:
    """`$0.42`, `$1,250`, and `$0.0031` where a cent is too coarse."""
    return f"${usd:,.0f}" if usd >= 100 else f"${usd:.2f}" if usd >= 0.1 else f"${usd:.2g}"


def devices_text(devices: Iterable[int]) -> str:
    """Sorted runs: `0-7, 16-31`."""
    runs: list[list[int]] = []
    for device in sorted(devices):
        if runs and device == runs[-1][1] + 1:
            runs[-1][1] = device
        else:
            runs.append([device, device])
    return ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in runs)


def axes_used(layouts: Iterable[Layout]) -> tuple[str, ...]:
    """The axes worth a place in the table: dp, tp, pp always, cp and ep where any layout uses them."""
    known = tuple(layouts)
    return (*AXES, *(axis for axis in RARE_AXES if any(getattr(layout, axis) > 1 for layout in known)))


def axes_text(layout: Layout, axes: Sequence[str] = AXES) -> str:
    """`4/8/2` for dp/tp/pp."""
    return "/".join(str(getattr(layout, axis)) for axis in axes)


def layout_text(layout: Layout) -> str:
    """`dp 4, tp 8 on devices 0-31`: the axes above 1."""
    axes = [f"{axis} {getattr(layout, axis)}" for axis in (*AXES, *RARE_AXES) if getattr(layout, axis) > 1]
    sharding = ["fsdp"] if layout.sharding == "fsdp" else []
    where = f"device{'s' * (layout.mesh.n_devices > 1)} {devices_text(layout.mesh.devices)}"
    return f"{', '.join(axes + sharding) or 'one copy'} on {where}"


def words(term: str) -> str:
    """`kv_cache` as people write it: `KV cache`."""
    return term.replace("_", " ").replace("kv ", "KV ")
