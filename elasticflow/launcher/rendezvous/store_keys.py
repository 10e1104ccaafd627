"""The keys through which the supervisor and the agents of a launch talk.

They lie in one control store under the launch's own prefix (`protocol/control_store.py`):

    invitation              for machines that want to take part (`invitation.py`)
    noticed                 how many machines have read the exit code
    launch/exit_code        of the launch, once it is over
    head                    a number that the supervisor changes while it lives (`leadership.py`)
    joined                  how many machines have joined so far
    told/feeds              number of outboxes so far: every started agent and every joined machine has one
    told/feed/<o>/<i>       the i-th message to the supervisor in outbox o (`protocol/messages.py`)
    told/beat/<o>           a number that the agent with outbox o, while alive, changes several times a second
    gone<o>/now             the agent with outbox o is to exit: its node was let go, or counts as lost. The server sends it to
                            that agent alone, also where half of all nodes are lost at a time
    orders/rounds           number of orders so far
    orders/round/<i>        the i-th order to all agents (`protocol/messages.py`)
    parts/<i>/<b>           what the nodes of block b are to do by that order: no agent reads what all others are to do
    orders/drain/<g>        workers of generation g are asked to exit after a step
    orders/stop/<g>         workers of generation g are to be killed now: another worker of it has failed
    orders/files            nodes with run folders of their own are to send files (`launcher/rendezvous/requests.py`)
    orders/stacks/<g>       agents are to send the stacks of generation g's workers
    orders/master/<g>       where rank 0 of a script listens in generation g: told by its node, and sent to all as orders are
    orders/check            a generation, and names of nodes: devices there are to be checked, now that its workers are gone

Workers find the store of their own process group through it, under `run/<generation>/` (runtime/process/process_group.py).
"""

from __future__ import annotations

import zlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from elasticflow.protocol.control_store import ControlStore
    from elasticflow.protocol.messages import GenerationRequest

TOLD = "told"
ORDERS = "orders"
LAUNCH = "launch"
INVITATION = "invitation"
EXIT_CODE = f"{LAUNCH}/exit_code"
CANCELLED = f"{LAUNCH}/cancelled"
NOTICED = "noticed"
SUPERVISOR_BEAT = "head"
FEED = f"{TOLD}/feed"
OUTBOX_COUNT = f"{TOLD}/feeds"
ORDER_COUNT = f"{ORDERS}/rounds"
FILES_WANTED = f"{ORDERS}/files"
CHECK_WANTED = f"{ORDERS}/check"
# Nodes whose parts lie together, about: each agent reads so many, and the supervisor writes so many at a time.
_BLOCK = 32


def message_key(outbox: int, number: int) -> str:
    """Return the key of the *number*-th message in *outbox*."""
    return f"{FEED}/{outbox}/{number}"


def outbox_of(key: str) -> int:
    """Return the number of the outbox in which the message with *key* lies."""
    return int(key.removeprefix(f"{FEED}/").partition("/")[0])


def beat_key(outbox: int) -> str:
    """Return the key that the agent with *outbox* changes while it lives."""
    return f"{TOLD}/beat/{outbox}"


def release_folder(outbox: int) -> str:
    """Return the first word of the keys that the server sends to the heartbeat of the agent with *outbox*."""
    return f"gone{outbox}"


def release_key(outbox: int) -> str:
    """Return the key that has the agent with *outbox* exit."""
    return f"{release_folder(outbox)}/now"


def order_key(number: int) -> str:
    """Return the key of the *number*-th order."""
    return f"{ORDERS}/round/{number}"


def parts_key(order: int, block: int) -> str:
    """Return the key of the parts of *block*'s nodes in the *order*-th order."""
    return f"parts/{order}/{block}"


def blocks_of(nodes: int) -> int:
    """Return the number of blocks in which the parts of so many *nodes* lie."""
    return -(-nodes // _BLOCK)


def block_of(node: str, blocks: int) -> int:
    """Return the block of *node*: by its name alone, so that every process knows it."""
    return zlib.crc32(node.encode()) % blocks


def request_key(what: GenerationRequest, generation: int) -> str:
    """Return the key that asks the workers of *generation* for *what*."""
    return f"{ORDERS}/{what}/{generation}"


def master_key(generation: int) -> str:
    """Return the key under which rank 0's node tells where rank 0 of a script listens in *generation*."""
    return f"{ORDERS}/master/{generation}"


def is_requested(store: ControlStore, what: GenerationRequest, generation: int) -> bool:
    """Return whether the supervisor has asked the workers of *generation* for *what*."""
    return bool(store.check([request_key(what, generation)]))


def requested_profile(store: ControlStore, generation: int) -> str | None:
    """Return the newest request for traces of *generation*, as the supervisor set it: a `PublishedProfile`; None: none yet."""
    key = request_key("profile", generation)
    return store.get(key).decode() if store.check([key]) else None


def requested_check(store: ControlStore) -> tuple[int, tuple[str, ...]]:
    """Return the newest request for a check of devices: after which generation, and on which nodes; generation 0: none yet."""
    if not store.check([CHECK_WANTED]):
        return 0, ()
    generation, *nodes = store.get(CHECK_WANTED).decode().split()
    return int(generation), tuple(nodes)


def is_released(store: ControlStore, outbox: int) -> bool:
    """Return whether the agent with *outbox* is to exit."""
    return bool(store.check([release_key(outbox)]))
