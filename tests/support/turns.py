"""Threads of which one runs at a time, up to its next action that is visible to others.

Their owner decides whose turn it is: by a seed, so that a test repeats the same order.
"""

import threading
from collections.abc import Callable, Iterable

from waiting import PATIENCE


class _Stopped(BaseException):
    """The others are not needed any more."""


class Player:
    """One thread that takes turns. A subclass defines what it does."""

    def __init__(self) -> None:
        self.can_go_on: Callable[[], bool] = lambda: True
        """True when the thread can go on."""
        self.has_ended = False
        self._error: BaseException | None = None
        self._turn = threading.Semaphore(0)
        self._thread = threading.Thread(target=self._live, daemon=True)
        self._turns: Turns

    def run(self) -> None:
        """All that it does."""
        raise NotImplementedError

    def _live(self) -> None:
        try:
            self._turns._wait_for_turn(self)
            self.run()
        except _Stopped:
            return
        except BaseException as error:
            self._error = error
        self.has_ended = True
        self._turns._is_back.release()


class Turns:
    """Lets one player run at a time."""

    def __init__(self) -> None:
        self.current: Player | None = None
        self._is_back = threading.Semaphore(0)
        self._is_stopped = False

    def let_run(self, player: Player) -> None:
        """Let a player run until it pauses or ends. Raises what it raises."""
        self.current = player
        if not player._thread.ident:
            player._turns = self
            player._thread.start()
        player._turn.release()
        if not self._is_back.acquire(timeout=PATIENCE):
            raise TimeoutError("one that never pauses")
        if player._error is not None:
            raise player._error

    def pause(self, can_go_on: Callable[[], bool] = lambda: True) -> None:
        """End the turn of the calling player. Returns when it has the next one."""
        player = self.current
        assert player is not None
        player.can_go_on = can_go_on
        self._is_back.release()
        self._wait_for_turn(player)

    def stop(self, players: Iterable[Player]) -> None:
        """End all players that have begun, wherever they are. There are no turns after that."""
        self._is_stopped = True
        begun = [player for player in players if player._thread.ident]
        for player in begun:
            player._turn.release()
        for player in begun:
            player._thread.join(PATIENCE)

    def _wait_for_turn(self, player: Player) -> None:
        player._turn.acquire()
        if self._is_stopped:
            raise _Stopped
