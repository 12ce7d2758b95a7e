"""The price of a plan in US dollars."""

from realgraph.planner.inputs.cluster import Cluster
from realgraph.planner.inputs.devices import device_kind
from realgraph.planner.report.content import Price

SECONDS_PER_HOUR = 3600.0


def price_of(
    cluster: Cluster, period_seconds: float, steps: int, usd_per_device_hour: float | None = None
) -> Price | None:
    """Every device of the cluster is paid for all the time, busy or idle.

    usd_per_device_hour: of every device; None: what devices.yaml says of each kind, and no price where one has none,
    or for this machine's own processor.
    The run is `steps` periods; start, evaluations and checkpoints come on top.
    """
    if cluster.is_cpu and usd_per_device_hour is None:
        return None
    rates = [
        device_kind(group.kind).usd_per_hour if usd_per_device_hour is None else usd_per_device_hour
        for group in cluster.groups
    ]
    if not all(rates):
        return None
    hourly = sum(rate * group.n_devices for rate, group in zip(rates, cluster.groups, strict=True))
    per_step = hourly * period_seconds / SECONDS_PER_HOUR
    return Price(hourly / cluster.n_devices, per_step, per_step * steps, steps)
