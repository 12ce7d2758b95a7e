"""`realgraph worker`: this host joins a run that `realgraph run` has started elsewhere, and works for it to its end."""

import asyncio
import logging
import sys

from realgraph.graphs.errors import Where
from realgraph.graphs.yaml.document import COMMAND_LINE
from realgraph.runtime.hosts.agent import run_agent
from realgraph.runtime.hosts.facts import own_address, own_name, split_address
from realgraph.runtime.hosts.join_key import read_join_key
from realgraph.runtime.processes.environment import variables
from realgraph.runtime.wire.interfaces import address_of_interface
from realgraph.screen.output import say


def worker_command(connect: str, key: str, name: str, interface: str) -> None:
    """Exits with 1 where the master is lost, 130 where it was interrupted. Raises ConfigError."""
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(message)s")
    address = split_address(connect)
    join_key = read_join_key(key)
    own = (
        address_of_interface(interface, Where(COMMAND_LINE, path="--interface")) if interface else own_address(address)
    )
    code = asyncio.run(run_agent(address, join_key, (name or own_name(variables()), own), say))
    if code:
        sys.exit(code)
