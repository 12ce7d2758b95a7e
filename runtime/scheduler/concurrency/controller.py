"""The limit of work in flight: the fewest groups that keep the engines busy and the tokens within the age bound.

AReaL's rule alone fills every place that the bound leaves. Where generation is the bottleneck a token is then as old as
the bound when it is trained, on average, and many are older. So besides that rule no more groups are in flight than
- end as many groups a second as training takes, or nearly as many as all places would;
- have the 95th percentile of the tokens' predicted ages within the bound, while that costs few trained tokens: fewer
  groups in flight end fewer tokens a second, of which more are young enough; predictions are corrected by what batches
  really have beyond the bound;
- fill the slots of the engines: more would only wait in their queues.
A surplus of groups (`batch.oversample`) comes on top of the first two.
Groups that wait for training, beyond a batch, take the place of such in flight. Which numbers hold follows from groups
that have ended (`speed.py`, `ages.py`) and from the seconds of training. Speeds are told apart only where the groups in
flight vary, so the limit swings a little. Pure: times are arguments; the same calls give the same limits.
"""

import math
from collections import deque
from collections.abc import Sequence

from msgspec import Struct

from realgraph.runtime.scheduler.concurrency.ages import BatchedGroup, TrainedGroup, masked_share
from realgraph.runtime.scheduler.concurrency.settings import ConcurrencySettings
from realgraph.runtime.scheduler.concurrency.speed import Speed, SpeedImage

NEARLY = 0.98  # of the speed with all places filled, that fewer have to reach
AHEAD = 1.1  # times the speed of training, that generation has to reach: groups take times of their own
MASKED_SHARE = 0.039  # of the tokens beyond the bound, aimed at: 5 % with a margin for batches that differ
LEAST_TRAINED = 0.95  # of the trained tokens a second with all places filled, that fewer groups may not fall below
SWING = 0.06  # of the limit, up and down by turns: speeds are told apart by it
LEAST_FILLED = 0.3  # of the limit: where less is in flight on average, something else holds generation up
LARGEST_CHANGE = 1.25  # factor between two limits
MEMORY_BATCHES, LEAST_MEMORY = 6, 100  # after so many groups, or these, a measurement counts 1 / e
KEPT_GROUPS = 96  # whose lengths predict ages: the newest trained ones, evenly taken from batches
KEEP = 0.7  # of a former step's seconds, when a new one comes
KEEP_SHARE = 0.9  # of the shares beyond the bound of former batches, when a new one comes
SURE_SHARE = 0.01  # shares below it say little of how far predictions are off
LARGEST_CORRECTION = 2.0  # factor, up or down, by which measured shares correct predicted ones
HALVINGS = 10  # of the range in which the groups in flight with all places filled lie


class FlyingImage(Struct, frozen=True, array_like=True):
    """A group in flight: since when, and the integral of the groups in flight over time until then."""

    group: int
    since: float
    area: float


class ConcurrencyImage(Struct, frozen=True):
    """The controller as plain data."""

    limit: float
    swing: int
    now: float
    area: float
    flying: tuple[FlyingImage, ...]
    made: tuple[tuple[int, float], ...]  # group -> steps when its last token was drawn
    trained: tuple[TrainedGroup, ...]
    speed: SpeedImage
    step_seconds: float
    period: float
    assembled: tuple[tuple[int, float], ...]
    ended_at: float
    kept: float
    left_out: float
    filled: float
    judged_at: float
    judged_area: float
    waiting: int
    waited: float
    stands: int
    masked: float
    predicted: float
    starving: bool
    starved: float


class Concurrency:
    """The groups in flight of a run whose samples may be stale. `version` counts train steps, as in the ledger."""

    def __init__(self, settings: ConcurrencySettings) -> None:
        self._settings = settings
        self._limit = float(settings.places if settings.fixed else settings.per_batch)
        self._swing = 1  # or -1
        self._now = self._area = 0.0
        self._flying: dict[int, FlyingImage] = {}
        self._made: dict[int, float] = {}  # groups in no batch yet: steps when their last token was drawn, with a part
        self._trained: deque[TrainedGroup] = deque(maxlen=KEPT_GROUPS)
        self._speed = Speed(max(LEAST_MEMORY, MEMORY_BATCHES * settings.per_batch))
        self._step_seconds = 0.0  # of training a step, where its batch is there; 0: not known yet
        self._period = 0.0  # seconds from the end of a step to the next one's; 0: not known yet
        self._assembled: dict[int, float] = {}  # step -> when its batch was there
        self._starving, self._starved = False, 0.0  # training has nothing to do without a batch; seconds of this step
        self._ended_at = -math.inf  # the last step
        self._kept = self._left_out = 0.0  # groups, older ones count less
        self._masked = self._predicted = 0.0  # shares beyond the bound, of batches and of limits; older ones count less
        self._filled = 1.0  # of the limit, on average: admission does not always fill it
        self._judged_at = self._judged_area = 0.0  # when the limit was set, and the integral until then
        self._waiting, self._waited = 0, 0.0  # groups that take places of such in flight; the same integral of theirs
        self._stands = 0  # batches since the limit was last on its way to another one
        self._most_of_slots = self._places_of_slots

    @property
    def image(self) -> ConcurrencyImage:
        """All that it has."""
        return ConcurrencyImage(
            limit=self._limit,
            swing=self._swing,
            now=self._now,
            area=self._area,
            flying=tuple(self._flying.values()),
            made=tuple(self._made.items()),
            trained=tuple(self._trained),
            speed=self._speed.image,
            step_seconds=self._step_seconds,
            period=self._period,
            assembled=tuple(self._assembled.items()),
            ended_at=self._ended_at,
            kept=self._kept,
            left_out=self._left_out,
            filled=self._filled,
            judged_at=self._judged_at,
            judged_area=self._judged_area,
            waiting=self._waiting,
            waited=self._waited,
            stands=self._stands,
            masked=self._masked,
            predicted=self._predicted,
            starving=self._starving,
            starved=self._starved,
        )

    def restore(self, image: ConcurrencyImage) -> None:
        """Go on from an image."""
        self._limit, self._swing, self._now, self._area = image.limit, image.swing, image.now, image.area
        self._flying = {one.group: one for one in image.flying}
        self._made, self._trained = dict(image.made), deque(image.trained, maxlen=KEPT_GROUPS)
        self._speed.restore(image.speed)
        self._step_seconds, self._period, self._ended_at = image.step_seconds, image.period, image.ended_at
        self._assembled, self._kept, self._left_out = dict(image.assembled), image.kept, image.left_out
        self._filled, self._judged_at, self._judged_area = image.filled, image.judged_at, image.judged_area
        self._masked, self._predicted = image.masked, image.predicted
        self._waiting, self._waited, self._stands = image.waiting, image.waited, image.stands
        self._starving, self._starved = image.starving, image.starved
        self._most_of_slots = self._places_of_slots

    # --- what happens -------------------------------------------------------------------------------------------------

    def _pass(self, now: float) -> None:
        self._area += len(self._flying) * (now - self._now)
        self._waited += self._waiting * (now - self._now)
        self._starved += self._starving * (now - self._now)
        self._now = now

    def admitted(self, groups: Sequence[int], now: float) -> None:
        """These are in flight from now on."""
        self._pass(now)
        for group in groups:
            self._flying[group] = FlyingImage(group, now, self._area)

    def generated(self, group: int, lengths: Sequence[int], version: int, now: float) -> None:
        """All samples of a group are there, the last token drawn at `version`. lengths: new tokens of each."""
        self._pass(now)
        began = self._flying.pop(group)
        seconds, longest = now - began.since, max(lengths, default=0)
        self._made[group] = version + (min(1.0, (now - self._ended_at) / self._period) if self._period else 0.0)
        if seconds > 0 and longest > 0:
            self._speed.add((self._area - began.area) / seconds, longest, seconds)

    def left(self, groups: Sequence[int], now: float) -> None:
        """These were left out: their prompt was too long, a filter said so, or they were overdue."""
        self._pass(now)
        for group in groups:
            self._flying.pop(group, None)
            self._made.pop(group, None)
        self._left_out += len(groups)

    def lost(self, groups: Sequence[int], now: float) -> None:
        """These are gone with their worker, and will be admitted anew."""
        self._pass(now)
        for group in groups:
            self._flying.pop(group, None)
            self._made.pop(group, None)

    def moved(self, groups: Sequence[int], now: float) -> None:
        """Others go on with these: they are in flight, and what they take says nothing of an engine's speed."""
        self._pass(now)
        for group in groups:
            self._made.pop(group, None)
            self._flying[group] = FlyingImage(group, math.inf, self._area)

    def batched(self, step: int, groups: Sequence[BatchedGroup], now: float) -> None:
        """The batch of `step` is there."""
        self._assembled[step] = now
        every = max(1, len(groups) * 3 // KEPT_GROUPS)  # the newest three batches, at least
        for place, one in enumerate(groups):
            drawn = self._made.pop(one.group, None)  # None: put back from a batch that was not made
            if drawn is not None and place % every == step % every and any(one.lengths):
                self._trained.append(TrainedGroup(one.lengths, step - drawn))
        self._compare(groups)
        self._kept = KEEP * self._kept + len(groups)
        self._left_out *= KEEP
        self._set_limit()

    def _compare(self, groups: Sequence[BatchedGroup]) -> None:
        """Set what a batch has beyond the bound beside what is predicted of the limit, where that stands."""
        if not self._settings.takes_overdue or self._stands <= self._settings.bound:
            return
        n_tokens = sum(sum(one.lengths) for one in groups)
        masked = sum(one.n_old for one in groups) / n_tokens if n_tokens else 0.0
        predicted = self._predicted_share(max(1.0, self._limit * self._filled))
        self._masked = KEEP_SHARE * self._masked + (1 - KEEP_SHARE) * masked
        self._predicted = KEEP_SHARE * self._predicted + (1 - KEEP_SHARE) * predicted

    def starves(self, starving: bool, now: float) -> None:
        """From now on the devices that train have nothing to do until a batch is there, or they have again."""
        self._pass(now)
        self._starving = starving

    def step_ended(self, step: int, now: float) -> None:
        """Every call of `step` has ended: its training took the time from when both its batch and the device were
        there, less that in which its turn came behind one that waited for another batch."""
        self._pass(now)
        seconds = now - max(self._assembled.pop(step, now), self._ended_at)
        if self._ended_at > -math.inf:
            seconds = min(seconds, now - self._ended_at - self._starved)
            self._period = _mixed(self._period, now - self._ended_at)
        self._step_seconds = _mixed(self._step_seconds, max(0.0, seconds))
        self._ended_at, self._starved = now, 0.0

    # --- the limit ----------------------------------------------------------------------------------------------------

    def room(self, n_waiting: int) -> int:
        """Groups that may be admitted now. n_waiting: groups that are ready and not trained yet, in a batch or in none,
        without those of the batch that trains."""
        limit = self._limit * (1 if self._settings.fixed else 1 + self._swing * SWING) + self._settings.surplus
        limit = min(max(1.0, limit), self._most_of_slots)
        self._waiting = max(0, n_waiting - (1 + self._settings.needed) * self._settings.per_batch)
        return max(0, math.ceil(limit) - self._waiting - len(self._flying))

    @property
    def _places_of_slots(self) -> float:
        """Groups in flight that keep all slots in use: on average one has fewer sequences left than it began with."""
        tokens = sum(sum(group.lengths) for group in self._trained)
        longest = sum(max(group.lengths) for group in self._trained)
        running = tokens / longest if longest else float(self._settings.samples_per_group)
        return max(1.0, 1 + self._settings.slots / max(1.0, running))

    @property
    def most_per_engine(self) -> float:
        """Groups of one engine that keep its slots in use, one of them in its queue: what is beyond that waits for
        whichever engine has room first."""
        return 1 + (self._most_of_slots - 1) / self._settings.n_engines

    def _set_limit(self) -> None:
        """Judge anew, at each batch."""
        self._measure_filled()
        self._swing, self._most_of_slots = -self._swing, self._places_of_slots
        if self._settings.fixed or not self._speed.known:
            return
        wanted = max(1.0, min(self._busy, self._young)) / self._filled
        wanted = min(wanted, float(self._settings.places))
        limit = min(max(wanted, self._limit / LARGEST_CHANGE), self._limit * LARGEST_CHANGE)
        self._stands = self._stands + 1 if limit == wanted else 0
        self._limit = limit

    def _measure_filled(self) -> None:
        """Compare the groups in flight since the limit was set, and those that took places of such, with it."""
        seconds, area = self._now - self._judged_at, self._area - self._judged_area + self._waited
        if self._judged_at and seconds > 0:
            self._filled = _mixed(self._filled, min(1.0, max(LEAST_FILLED, area / seconds / self._limit)))
        self._judged_at, self._judged_area, self._waited = self._now, self._area, 0.0

    @property
    def _most(self) -> float:
        """Groups in flight with all places filled: half a batch is ready on average, and one trains at times."""
        per_batch, needed = self._settings.per_batch, self._settings.needed
        places = float(self._settings.places - needed * per_batch)
        low, high = places - 1.5 * per_batch, places - 0.5 * per_batch
        for _ in range(HALVINGS):  # more in flight train for more of the time, which leaves fewer places
            middle = (low + high) / 2
            training = min(1.0, self._step_seconds * self._rate(max(1.0, middle)))  # of the time
            if places - per_batch * (0.5 + training) > middle:
                low = middle
            else:
                high = middle
        least = per_batch if needed else 1.0  # turns that wait for a batch wait for all of it
        return max(1.0, min(max(least, high), self._most_of_slots))

    @property
    def _made_per_step(self) -> float:
        """Groups that are made for a step, those included that are left out on the way."""
        return self._settings.per_batch * (1 + self._left_out / self._kept)

    @property
    def _steps_per_second(self) -> float:
        """The speed of training alone."""
        return 1 / self._step_seconds if self._step_seconds > 0 else math.inf

    def _rate(self, running: float) -> float:
        """Steps a second with so many groups in flight."""
        return min(self._speed.groups_per_second(running) / self._made_per_step, self._steps_per_second)

    @property
    def _busy(self) -> float:
        """The fewest groups in flight that keep the engines busy, or training."""
        most = self._speed.groups_per_second(self._most)
        needed = AHEAD * self._steps_per_second * self._made_per_step
        return min(self._most, self._speed.running_for(min(NEARLY * most, needed)))

    def _share(self, running: float) -> float:
        """Share of the tokens beyond the bound with so many groups in flight, predicted and corrected."""
        correction = (self._masked + SURE_SHARE) / (self._predicted + SURE_SHARE)
        correction = min(LARGEST_CORRECTION, max(1 / LARGEST_CORRECTION, correction))
        return min(1.0, correction * self._predicted_share(running))

    def _predicted_share(self, running: float) -> float:
        """The share that follows from lengths and speeds."""
        token_steps = self._speed.token_seconds(running) * self._rate(running)
        return masked_share(self._trained, self._settings.bound, token_steps)

    @property
    def _young(self) -> float:
        """The most groups in flight with which few tokens are beyond the bound, no fewer than train enough tokens."""
        most = self._most
        if self._share(most) <= MASKED_SHARE:
            return most
        least_trained = LEAST_TRAINED * self._trained_tokens(most)
        low, high = 1.0, most  # what is beyond the bound rises with the groups in flight
        while high - low > max(0.5, 0.01 * high):
            middle = (low + high) / 2
            young = self._share(middle) <= MASKED_SHARE
            if young or self._trained_tokens(middle) < least_trained:
                low = middle
            else:
                high = middle
        return high

    def _trained_tokens(self, running: float) -> float:
        """Tokens within the bound that are trained a second, in batches."""
        return self._rate(running) * (1 - self._share(running))


def _mixed(known: float, new: float) -> float:
    """A mean in which older values count less; 0: none is known yet."""
    return KEEP * known + (1 - KEEP) * new if known else new
