"""The reach of the Hugging Face Hub: asked once, in seconds, before its clients retry for a minute."""

import functools
import socket
import urllib.request
from urllib.parse import urlsplit

REACH_SECONDS = 4.0


@functools.cache
def out_of_reach() -> str:
    """Reason why this machine can't reach the Hub, '' where it can. Then its clients look into their caches only.

    Behind a proxy nothing is tried: the name need not resolve here. The answer holds for the life of the process.
    """
    from huggingface_hub import constants  # late: only Hub ids need it

    if constants.HF_HUB_OFFLINE:
        return "HF_HUB_OFFLINE is set"
    address = urlsplit(constants.ENDPOINT)
    host, port = address.hostname or "", address.port or (443 if address.scheme == "https" else 80)
    if address.scheme in urllib.request.getproxies() and not urllib.request.proxy_bypass(host):
        return ""
    try:
        socket.create_connection((host, port), REACH_SECONDS).close()
    except OSError as error:
        constants.HF_HUB_OFFLINE = True  # all of its clients ask for this one
        return f"{host} can't be reached: {error.strerror or error}"
    return ""


def hint(name: str, kind: str) -> str:
    """Advice about a `kind` (model, dataset) that the Hub would have to give; '' where it can be reached."""
    option = " --repo-type dataset" if kind == "dataset" else ""
    if not out_of_reach():
        return ""
    return f"where there is a network: hf download{option} {name}; then bring the cache here, or give a local path"
