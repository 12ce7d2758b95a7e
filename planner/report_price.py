"""What a plan costs in US dollars."""

from realgraph.planner.cluster import Cluster
from realgraph.planner.report import Price

SECONDS_PER_HOUR = 3600.0


def price_of(cluster: Cluster, period_seconds: float, steps: int, usd_per_device_hour: float) -> Price:
    """Every device of the cluster is paid for all the time, busy or idle.

    usd_per_device_hour: of one device. The run is `steps` periods; start, evaluations and checkpoints come on top.
    """
    per_step = usd_per_device_hour * cluster.n_devices * period_seconds / SECONDS_PER_HOUR
    return Price(usd_per_device_hour, per_step, per_step * steps, steps)
