"""The witness: an acceptor that is a journal of files in the run folder, so that half of the agents can go on.

Each entry of the journal is a file that only one agent can create, by a hard link. So all agents see the same entries
in the same order, and compute the same state of the acceptor from them. A single file, which would accept one record
for good, is not enough: it knows no ballots, so one half could decide its record while a later majority, which has
seen only the vote of the other half, decides another one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from hpctrain.agent.consensus import AcceptorState, Ballot, Vote
from hpctrain.records.history.generation import Generation
from hpctrain.records.history.witness import WitnessEntry


class Journal(Protocol):
    """The files of the witness's journal (`GenerationStore`, whose errors the methods raise)."""

    def entry(self, number: int, place: int) -> WitnessEntry | None:
        """Return the entry at `place`, from 0, of the journal about generation `number`; None if the journal is
        shorter."""

    def append(self, number: int, place: int, entry: WitnessEntry) -> bool:
        """Create the entry at `place`, from 0. Return False if there is an entry at this place already."""


class Witness:
    """The witness of the decision about one generation, as one agent uses it. Calls may take as long as the file system
    hangs."""

    def __init__(self, journal: Journal, number: int) -> None:
        self._journal = journal
        self._number = number
        self._length = 0
        self._state: AcceptorState[Generation] = AcceptorState()

    def prepare(self, ballot: Ballot) -> tuple[bool, AcceptorState[Generation]]:
        """Ask for the promise of a ballot. Return whether the witness promises it, and its state.

        Raises:
            StorageError: the run folder cannot be read or written.
            FileError, UntrustedError: an entry of the journal has errors or is untrusted.
        """
        entry = WitnessEntry(number=self._number, round=ballot.round, proposer=ballot.proposer)
        return self._append(ballot, entry, lambda state: state.after_prepare(ballot))

    def accept(self, vote: Vote[Generation]) -> tuple[bool, AcceptorState[Generation]]:
        """Ask for a vote. Return whether the witness has accepted the record in this ballot, and its state.

        Raises:
            StorageError: the run folder cannot be read or written.
            FileError, UntrustedError: an entry of the journal has errors or is untrusted.
        """
        ballot = vote.ballot
        entry = WitnessEntry(number=self._number, round=ballot.round, proposer=ballot.proposer, record=vote.value)
        return self._append(ballot, entry, lambda state: state.after_accept(vote))

    def _append(
        self,
        ballot: Ballot,
        entry: WitnessEntry,
        after: Callable[[AcceptorState[Generation]], AcceptorState[Generation]],
    ) -> tuple[bool, AcceptorState[Generation]]:
        while True:
            self._read()
            if not self._state.allows(ballot):
                return False, self._state
            # That an entry is missing proves nothing (NFS caches names); that it could be created does.
            if self._journal.append(self._number, self._length, entry):
                self._length, self._state = self._length + 1, after(self._state)
                return True, self._state

    def _read(self) -> None:
        while (entry := self._journal.entry(self._number, self._length)) is not None:
            ballot = Ballot(entry.round, entry.proposer)
            # An entry that this program would not have written changes nothing.
            if self._state.allows(ballot):
                prepared = self._state.after_prepare(ballot)
                self._state = prepared if entry.record is None else prepared.after_accept(Vote(ballot, entry.record))
            self._length += 1
