"""A machine's part in a launch that another process leads."""

from __future__ import annotations

import contextlib
import math
import signal
import time
from typing import TYPE_CHECKING

from elasticflow.errors import ANSWER_IS_NO, INTERRUPTED, KILLED_BY_USER
from elasticflow.launcher.agent.agent_process import AgentEnd
from elasticflow.launcher.rendezvous.liveness import SupervisorWatch
from elasticflow.launcher.rendezvous.store_keys import CANCELLED, EXIT_CODE, NOTICED
from elasticflow.launcher.rendezvous.supervisor_channel import Outbox
from elasticflow.launcher.supervisor.leave_requests import LeaveRequests
from elasticflow.protocol.messages import AgentDied
from elasticflow.protocol.store_address import StoreLostError
from elasticflow.system.polling import attempts

if TYPE_CHECKING:
    from collections.abc import Callable

    from elasticflow.launcher.agent.agent_process import AgentProcess
    from elasticflow.protocol.control_store import ControlStore

_POLL_S = 0.05
# An agent that ends so many times in a row by its own doing or for memory, each time so soon after its start, will not do better.
_MOST_STARTS = 5
_SOON_S = 60.0
# An agent that still imports ignores the request to leave: it is asked again.
_ASK_S = 0.2
# A machine that is cut off tries for so long to reach the launch again.
_BACK_S, _AGAIN_S = 60.0, 1.0


class JoinedNode:
    """This machine's part in the launch: its agent, and the signals that end it.

    Args:
        store: The launch's keys; the server sends those below `LAUNCH`.
        say: Called with what a person should know.
        reconnect: Returns another client of the store if the launch can be reached again, None if it is gone for good.
            Raises StoreLostError while neither is known.
        is_store_outside: The store outlives the supervisor, which has to be watched then.
    """

    def __init__(
        self,
        node: str,
        agent: AgentProcess,
        store: ControlStore,
        say: Callable[[str], None],
        reconnect: Callable[[], ControlStore | None] = lambda: None,
        *,
        is_store_outside: bool = True,
    ) -> None:
        self._node, self._agent, self._store, self._say = node, agent, store, say
        self._reconnect, self._is_store_outside = reconnect, is_store_outside
        self._outbox = Outbox(store)
        self._supervisor = self._watch()
        self._final: int | None = None
        self._is_cancelled = False
        self._asked = LeaveRequests()
        self._started_at, self._soon_ended = 0.0, 0
        self._next_try = 0.0
        self._next_request = -math.inf

    @property
    def was_asked(self) -> bool:
        """True if a signal has asked this machine to exit, or the run was cancelled."""
        return self._is_cancelled or bool(self._asked.numbers)

    def run(self) -> int | None:
        """Return the exit code once the agent has left for good, None once the launch's supervisor is silent.

        Nothing that it started lives afterwards.
        """
        previous = self._asked.listen()
        self._supervisor = self._watch()
        try:
            self._start()
            while True:
                time.sleep(_POLL_S)
                if len(self._asked.numbers) > 1:
                    return KILLED_BY_USER
                if self._asked.numbers:
                    self._ask_agent_to_leave(time.monotonic())
                self._look_for_end()
                # The machine that leads counts this node as lost, and cannot reach its agent.
                self._agent.end_if_stopped()
                code = self._agent.exit_code()
                if code is not None and (final := self._ended(code)) is not None:
                    return final
                # A supervisor that has told the exit code is silent while the agent's writer finishes here.
                if self._final is None and self._is_silent():
                    # Nobody is left who would let this node go.
                    return INTERRUPTED if self._asked.numbers else None
        finally:
            self._agent.end()
            for number, handler in previous.items():
                signal.signal(number, handler)

    def _ask_agent_to_leave(self, now: float) -> None:
        if now < self._next_request:
            return
        if self._next_request < 0:
            self._say("asked to leave: the workers leave after their step")
        self._next_request = now + _ASK_S
        self._agent.send(signal.SIGUSR1)

    def _watch(self) -> SupervisorWatch | None:
        """Return the watch of the supervisor; a supervisor that serves the store gives no sign of life: the connection's end is its own."""
        return SupervisorWatch(self._store) if self._is_store_outside else None

    def _is_silent(self) -> bool:
        try:
            return self._supervisor is not None and self._supervisor.look()
        except RuntimeError:  # the agent sees it, too, and ends
            return False

    def _look_for_end(self) -> None:
        """Note the launch's exit code as soon as it is there: its store may go soon after."""
        if self._final is not None:
            return
        try:
            if self._store.check([EXIT_CODE]):
                self._final = int(self._store.get(EXIT_CODE))
                self._is_cancelled = self._store.check([CANCELLED])
                self._store.add(NOTICED, 1)
        except RuntimeError:  # the agent sees it, too, and ends
            if time.monotonic() > self._next_try:
                self._connect_again()

    def _ended(self, code: int) -> int | None:
        """Return this process' exit code now that the agent has ended; None if it was started again."""
        if self._final is not None:
            return self._final
        try:
            if self._asked.numbers:
                return INTERRUPTED
            self._tell_of_end(code)
        except RuntimeError as error:
            self._say(f"the launch is gone: {error}")
            return INTERRUPTED
        will_recur = AgentEnd(code).is_its_own_doing or self._agent.is_killed_for_memory()
        counts = will_recur and time.monotonic() < self._started_at + _SOON_S
        self._soon_ended = self._soon_ended + 1 if counts else 0
        if self._soon_ended >= _MOST_STARTS:
            self._say(
                f"the agent ended {self._soon_ended} times in a row: this machine takes no part any more"
            )
            self._say(self._agent.last_words())
            return ANSWER_IS_NO
        self._say(f"the agent ended with code {code}, and is started again")
        self._start()
        return None

    def _tell_of_end(self, code: int) -> None:
        """Tell the supervisor that the agent has ended; a machine that was cut off does so once it is back.

        Raises:
            StoreLostError: the launch is gone, or does not come back.
        """
        message = AgentDied(self._node, f"its agent ended with code {code}")
        has_told = False
        for _ in attempts(_BACK_S, _AGAIN_S):
            try:
                self._outbox.post(message)
            except StoreLostError as error:
                if not has_told:
                    self._say(f"cut off from the launch: {error}")
                has_told = True
                if self._asked.numbers or not self._connect_again():
                    raise
            else:
                return
        self._outbox.post(message)

    def _connect_again(self) -> bool:
        """Try to reach the launch by another connection; return false if it is gone for good.

        One that was cut for long comes back late, by TCP's own rules.
        """
        self._next_try = time.monotonic() + _AGAIN_S
        with contextlib.suppress(StoreLostError):
            if (store := self._reconnect()) is None:
                return False
            self._store, self._outbox = store, Outbox(store)
            self._supervisor = self._watch()
        return True

    def _start(self) -> None:
        self._agent.start()
        self._started_at = time.monotonic()
