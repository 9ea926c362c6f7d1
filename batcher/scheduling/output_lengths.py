"""The distribution of output lengths, estimated from requests that have ended and from running ones.

If a request ended at its limit, was aborted or still runs, only a lower bound of its length is known: a censored
observation. The survival function is therefore the Kaplan-Meier estimate ("Nonparametric Estimation from Incomplete
Observations", 1958). So twenty requests that used 16 of 16 tokens do not affect the estimate for longer outputs. A weak
prior fills in where observations are few.
"""

from __future__ import annotations

import numpy as np

_MEMORY = 256  # ended requests after which the weight of an observation has decayed to 1/e
_PRIOR_WEIGHT = 4.0  # requests that the prior counts as, at every length
_PRIOR_MEDIAN = 256  # tokens; by the prior, an output is longer than n tokens with the probability 256 / (256 + n)
_BINS_PER_OCTAVE = 16


class OutputLengths:
    """The distribution of output lengths, in tokens, of requests that may stop by themselves.

    Lengths are counted in bins: one each up to 16 tokens, then sixteen per octave.

    Args:
        longest: tokens, the most that a request can emit; longer outputs count as `longest`.
    """

    def __init__(self, longest: int) -> None:
        edges = list(range(_BINS_PER_OCTAVE + 1))
        while edges[-1] < longest:
            edges.append(max(edges[-1] + 1, int(edges[-1] * 2 ** (1 / _BINS_PER_OCTAVE))))
        upper = np.array(edges)  # i64[B]; bin b holds the lengths above upper[b - 1] and up to upper[b]
        lower = np.concatenate([[0], upper[:-1]])
        self._bins = np.searchsorted(upper, np.arange(longest + 1))  # i64[longest + 1], length -> bin
        self._longest = longest
        self._prior_hazards = 1 - (_PRIOR_MEDIAN + lower) / (_PRIOR_MEDIAN + upper)  # f64[B]
        self._stopped = np.zeros(upper.size)  # f64[B], aged counts of outputs that stopped by themselves
        self._censored = np.zeros(upper.size)  # f64[B], likewise of those that were cut off

    def bins(self, lengths: np.ndarray) -> np.ndarray:
        """The bin of each length (tokens), in the shape of `lengths`."""
        bins: np.ndarray = self._bins[np.minimum(lengths, self._longest)]
        return bins

    def observe(self, length: int, *, stopped: bool) -> None:
        """Counts an output of `length` tokens that ended by itself (`stopped`), or at a limit, or by its client."""
        fade = 1 - 1 / _MEMORY
        self._stopped *= fade
        self._censored *= fade
        counts = self._stopped if stopped else self._censored
        counts[self._bins[min(length, self._longest)]] += 1

    def survival(self, running: np.ndarray) -> np.ndarray:
        """f64[B], the probability that an output is longer than the lengths of each bin. Never 0.

        Args:
            running: i64[n], tokens that each running request has emitted so far.
        """
        censored = self._censored + np.bincount(self.bins(running), minlength=self._censored.size)
        # At risk in a bin: the outputs that stopped in it or later, and those that were cut off later.
        at_risk = (self._stopped + censored)[::-1].cumsum()[::-1] - censored
        hazards = (self._stopped + _PRIOR_WEIGHT * self._prior_hazards) / (at_risk + _PRIOR_WEIGHT)
        return np.cumprod(1 - hazards)
