//! Chunks on their way: one flight a chunk, however many wait for it, and the order in which the store is asked. Neighbours that are wanted alike are
//! asked for together, for stores take as long for a small range as for a large one. Pure: time comes in as an argument.

use std::collections::{HashMap, VecDeque};
use std::hash::Hash;
use std::time::{Duration, Instant};

/// Why a chunk is wanted. What somebody waits for goes first.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Priority {
    Read,
    Ahead,
    Prefetch,
}

/// What stands in a row.
pub trait Neighbours: Sized {
    fn before(self) -> Option<Self>;
    fn after(self) -> Option<Self>;
}

/// Bytes under way up to which a request of each priority is sent. They fill a long link, and what is read after them doesn't wait behind much.
const WINDOWS: [u64; 3] = [8 << 20, 4 << 20, 2 << 20];
/// The most bytes of neighbours that are asked for together: 17 ms of a link of 1 Gbit/s.
const TOGETHER: u64 = 2 << 20;

/// Pauses after the store has said "try again".
const FIRST_REST: Duration = Duration::from_millis(50);
const LONGEST_REST: Duration = Duration::from_secs(2);
/// A frame that isn't the chunk's is asked for again so often.
const ATTEMPTS: u32 = 3;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Phase {
    /// A worker has it: checks, decodes or writes.
    Held,
    Queued,
    Resting(Instant),
    Sent {
        id: u64,
        since: Instant,
    },
}

struct Flight<W> {
    /// Tells it from an earlier flight of the same chunk.
    serial: u64,
    waiters: Vec<W>,
    priority: Priority,
    phase: Phase,
    /// Bytes of it that count among those under way to the store and back.
    out: u64,
    /// It failed together with others: now it is asked for by itself.
    alone: bool,
    wrong: u32,
    refused: u32,
}

/// All flights. `K` names a chunk, `W` is one who waits.
pub struct Flights<K, W> {
    flights: HashMap<K, Flight<W>>,
    /// One queue a priority. An entry counts only while its flight is queued with that priority.
    queues: [VecDeque<K>; 3],
    /// Requests under way, with the chunks that each asked for, in their order.
    sent: HashMap<u64, Vec<K>>,
    /// Bytes under way.
    out: u64,
    last: u64,
}

impl<K: Copy + Eq + Hash + Neighbours, W> Flights<K, W> {
    pub fn new() -> Self {
        Flights {
            flights: HashMap::new(),
            queues: Default::default(),
            sent: HashMap::new(),
            out: 0,
            last: 0,
        }
    }

    pub fn is_empty(&self) -> bool {
        self.flights.is_empty()
    }

    /// Whether the chunk is on its way.
    pub fn has(&self, key: K) -> bool {
        self.flights.contains_key(&key)
    }

    /// Whether the chunk is on its way; then `waiter` waits for it too, and it goes as fast as `priority` asks. Else the waiter comes back.
    pub fn join(&mut self, key: K, priority: Priority, waiter: Option<W>) -> Result<(), Option<W>> {
        let Some(flight) = self.flights.get_mut(&key) else {
            return Err(waiter);
        };
        flight.waiters.extend(waiter);
        if priority < flight.priority {
            flight.priority = priority;
            if flight.phase == Phase::Queued {
                self.queues[priority as usize].push_back(key);
            }
        }
        Ok(())
    }

    /// Starts the flight of a chunk that has none, in a worker's hands. Returns its serial number.
    pub fn start(&mut self, key: K, priority: Priority, waiter: Option<W>) -> u64 {
        self.last += 1;
        let flight = Flight {
            serial: self.last,
            waiters: waiter.into_iter().collect(),
            priority,
            phase: Phase::Held,
            out: 0,
            alone: false,
            wrong: 0,
            refused: 0,
        };
        self.flights.insert(key, flight);
        self.last
    }

    /// Whether this very flight is still going on.
    pub fn is_current(&self, key: K, serial: u64) -> bool {
        self.flights
            .get(&key)
            .is_some_and(|flight| flight.serial == serial)
    }

    /// Lets it be asked for at the store.
    pub fn enqueue(&mut self, key: K) {
        if let Some(flight) = self.flights.get_mut(&key) {
            flight.phase = Phase::Queued;
            self.out -= std::mem::take(&mut flight.out);
            self.queues[flight.priority as usize].push_back(key);
        }
    }

    /// The next ones to ask for in one request, neighbours in their order, and the id to ask with. `bytes`: how many a request from one chunk to another
    /// asks for; None: there can be no such request.
    pub fn next_to_send(
        &mut self,
        now: Instant,
        bytes: impl Fn(K, K) -> Option<u64>,
    ) -> Option<(u64, Vec<K>)> {
        for (priority, window) in WINDOWS.into_iter().enumerate() {
            while self.out < window {
                let Some(key) = self.queues[priority].pop_front() else {
                    break;
                };
                if self.queued(key, priority).is_none() {
                    continue;
                }
                let run = self.run_around(key, priority, &bytes);
                self.last += 1;
                let id = self.last;
                for key in &run {
                    if let Some(flight) = self.flights.get_mut(key) {
                        flight.phase = Phase::Sent { id, since: now };
                        flight.out = bytes(*key, *key).unwrap_or_default();
                        self.out += flight.out;
                    }
                }
                self.sent.insert(id, run.clone());
                return Some((id, run));
            }
        }
        None
    }

    /// The flight of a chunk that waits to be asked for with this priority.
    fn queued(&self, key: K, priority: usize) -> Option<&Flight<W>> {
        let flight = self.flights.get(&key)?;
        (flight.phase == Phase::Queued && flight.priority as usize == priority).then_some(flight)
    }

    /// A queued chunk, and its neighbours on both sides that can be asked for with it.
    fn run_around(&self, key: K, priority: usize, bytes: &impl Fn(K, K) -> Option<u64>) -> Vec<K> {
        let fits = |first, last| bytes(first, last).is_some_and(|bytes| bytes <= TOGETHER);
        let joins = |key: &K| {
            self.queued(*key, priority)
                .is_some_and(|flight| !flight.alone)
        };
        if !joins(&key) {
            return vec![key];
        }
        let mut run = VecDeque::from([key]);
        let (mut first, mut last) = (key, key);
        while let Some(next) = last
            .after()
            .filter(|next| joins(next) && fits(first, *next))
        {
            run.push_back(next);
            last = next;
        }
        while let Some(next) = first
            .before()
            .filter(|next| joins(next) && fits(*next, last))
        {
            run.push_front(next);
            first = next;
        }
        run.into()
    }

    /// The store has answered `id`: the flights are in a worker's hands. Returns the chunks that were asked for, in their order, each with its
    /// flight's serial number, or None where nobody waits for it any more.
    pub fn answered(&mut self, id: u64) -> Vec<(K, Option<u64>)> {
        let run = self.sent.remove(&id).unwrap_or_default();
        let held = |key: K| {
            let flight = self.flights.get_mut(&key)?;
            if !matches!(flight.phase, Phase::Sent { id: sent, .. } if sent == id) {
                return None;
            }
            flight.phase = Phase::Held;
            Some(flight.serial)
        };
        let serials: Vec<_> = run.iter().copied().map(held).collect();
        run.into_iter().zip(serials).collect()
    }

    /// It is asked for again, by itself.
    pub fn separate(&mut self, key: K) {
        if let Some(flight) = self.flights.get_mut(&key) {
            flight.alone = true;
            self.enqueue(key);
        }
    }

    /// The connection is gone: what was sent will be sent again.
    pub fn link_lost(&mut self) {
        self.sent.clear();
        let lost: Vec<K> = self
            .flights
            .iter()
            .filter(|(_, flight)| matches!(flight.phase, Phase::Sent { .. }))
            .map(|(key, _)| *key)
            .collect();
        lost.into_iter().for_each(|key| self.enqueue(key));
    }

    /// When the request was sent that has waited longest for its answer.
    pub fn oldest_sent(&self) -> Option<Instant> {
        let sent = self.sent.iter().flat_map(|(id, run)| {
            run.iter()
                .filter_map(|key| match self.flights.get(key)?.phase {
                    Phase::Sent { id: own, since } if own == *id => Some(since),
                    _ => None,
                })
        });
        sent.min()
    }

    /// The store asks to be asked later. What nobody waits for is given up: true if it flies on.
    pub fn rest(&mut self, key: K, now: Instant) -> bool {
        let Some(flight) = self.flights.get_mut(&key) else {
            return false;
        };
        if flight.waiters.is_empty() {
            self.land(key);
            return false;
        }
        let pause = FIRST_REST
            .saturating_mul(1 << flight.refused.min(16))
            .min(LONGEST_REST);
        flight.refused += 1;
        flight.phase = Phase::Resting(now + pause);
        self.out -= std::mem::take(&mut flight.out);
        true
    }

    /// Its frame was not the chunk's. True: it is asked for again; false: that has been tried often enough.
    pub fn was_wrong(&mut self, key: K) -> bool {
        let Some(flight) = self.flights.get_mut(&key) else {
            return false;
        };
        flight.wrong += 1;
        flight.alone = true;
        let again = flight.wrong < ATTEMPTS;
        if again {
            self.enqueue(key);
        }
        again
    }

    /// Those that wait for it now; later ones can still join.
    pub fn take_waiters(&mut self, key: K) -> Vec<W> {
        self.flights
            .get_mut(&key)
            .map(|flight| std::mem::take(&mut flight.waiters))
            .unwrap_or_default()
    }

    /// Ends a flight. Returns those that still wait.
    pub fn land(&mut self, key: K) -> Vec<W> {
        let Some(flight) = self.flights.remove(&key) else {
            return Vec::new();
        };
        // Its place in what was sent stays: the others of the request are told from it by their places.
        self.out -= flight.out;
        flight.waiters
    }

    /// Ends all flights of which `these` is true.
    pub fn land_all(&mut self, these: impl Fn(&K) -> bool) -> Vec<W> {
        let keys: Vec<K> = self.flights.keys().copied().filter(&these).collect();
        keys.into_iter().flat_map(|key| self.land(key)).collect()
    }

    /// Queues what has rested long enough.
    pub fn wake(&mut self, now: Instant) {
        let rested: Vec<K> = self
            .flights
            .iter()
            .filter(|(_, flight)| matches!(flight.phase, Phase::Resting(until) if until <= now))
            .map(|(key, _)| *key)
            .collect();
        rested.into_iter().for_each(|key| self.enqueue(key));
    }

    /// Takes out those who have waited too long. A chunk that nobody waits for any more isn't asked for again.
    pub fn expire(&mut self, too_long: impl Fn(&W) -> bool) -> Vec<(K, W)> {
        let mut expired = Vec::new();
        let mut given_up = Vec::new();
        for (key, flight) in &mut self.flights {
            let before = flight.waiters.len();
            let (late, others) = std::mem::take(&mut flight.waiters)
                .into_iter()
                .partition::<Vec<W>, _>(&too_long);
            flight.waiters = others;
            expired.extend(late.into_iter().map(|waiter| (*key, waiter)));
            let idle = matches!(flight.phase, Phase::Queued | Phase::Resting(_));
            if before > 0 && flight.waiters.is_empty() && idle {
                given_up.push(*key);
            }
        }
        given_up.into_iter().for_each(|key| drop(self.land(key)));
        expired
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    type Chunks = Flights<u32, &'static str>;

    impl Neighbours for u32 {
        fn before(self) -> Option<Self> {
            self.checked_sub(1)
        }

        fn after(self) -> Option<Self> {
            self.checked_add(1)
        }
    }

    /// Of each chunk.
    const BYTES: u64 = 256 << 10;

    fn never(first: u32, last: u32) -> Option<u64> {
        (first == last).then_some(BYTES)
    }

    fn all(first: u32, last: u32) -> Option<u64> {
        Some(u64::from(last - first + 1) * BYTES)
    }

    fn begin(flights: &mut Chunks, key: u32, priority: Priority, waiter: Option<&'static str>) {
        if let Err(waiter) = flights.join(key, priority, waiter) {
            flights.start(key, priority, waiter);
            flights.enqueue(key);
        }
    }

    fn sent(flights: &mut Chunks) -> Vec<u32> {
        let now = Instant::now();
        std::iter::from_fn(|| flights.next_to_send(now, never))
            .flat_map(|(_, run)| run)
            .collect()
    }

    #[test]
    fn all_who_want_a_chunk_share_one_request() {
        let mut flights = Chunks::new();
        begin(&mut flights, 1, Priority::Read, Some("a"));
        begin(&mut flights, 1, Priority::Read, Some("b"));
        let (id, run) = flights.next_to_send(Instant::now(), never).unwrap();
        assert_eq!(run, [1]);
        begin(&mut flights, 1, Priority::Read, Some("c"));
        assert_eq!(flights.next_to_send(Instant::now(), never), None);
        assert!(matches!(flights.answered(id)[..], [(1, Some(_))]));
        assert_eq!(flights.answered(id), []);
        assert_eq!(flights.take_waiters(1), ["a", "b", "c"]);
        begin(&mut flights, 1, Priority::Read, Some("d"));
        assert_eq!(flights.land(1), ["d"]);
        assert!(flights.is_empty() && flights.out == 0);
    }

    #[test]
    fn reads_overtake_what_is_fetched_ahead() {
        let mut flights = Chunks::new();
        (0..100).for_each(|key| begin(&mut flights, key, Priority::Prefetch, None));
        begin(&mut flights, 200, Priority::Ahead, None);
        begin(&mut flights, 99, Priority::Read, Some("a"));
        assert_eq!(sent(&mut flights)[..3], [99, 200, 0]);
        assert_eq!(flights.out, WINDOWS[2]);
        begin(&mut flights, 201, Priority::Ahead, None);
        assert_eq!(sent(&mut flights), [201]);
        (300..400).for_each(|key| begin(&mut flights, key, Priority::Read, Some("b")));
        sent(&mut flights);
        assert_eq!(flights.out, WINDOWS[0]);
    }

    #[test]
    fn a_lost_link_sends_everything_again() {
        let mut flights = Chunks::new();
        (0..3).for_each(|key| begin(&mut flights, key, Priority::Read, Some("a")));
        let (old, _) = flights.next_to_send(Instant::now(), never).unwrap();
        assert_eq!(sent(&mut flights).len(), 2);
        flights.link_lost();
        assert_eq!((flights.out, flights.oldest_sent()), (0, None));
        assert_eq!(flights.answered(old), []);
        assert_eq!(sent(&mut flights).len(), 3);
    }

    #[test]
    fn neighbours_wanted_alike_are_asked_for_together() {
        let mut flights = Chunks::new();
        for key in [5, 3, 9, 4, 6, 7] {
            begin(&mut flights, key, Priority::Prefetch, None);
        }
        begin(&mut flights, 8, Priority::Read, Some("a"));
        let now = Instant::now();
        let mut next = || {
            let most_three = |first, last| all(first, last).filter(|bytes| *bytes <= 3 * BYTES);
            flights.next_to_send(now, most_three).map(|(_, run)| run)
        };
        assert_eq!(next(), Some(vec![8]));
        assert_eq!(next(), Some(vec![5, 6, 7]));
        assert_eq!(next(), Some(vec![3, 4]));
        assert_eq!(next(), Some(vec![9]));
        assert_eq!(next(), None);
        assert_eq!(flights.out, 7 * BYTES);
    }

    #[test]
    fn a_read_does_not_wait_behind_a_prefetch_of_neighbours() {
        let mut flights = Chunks::new();
        (0..1000).for_each(|key| begin(&mut flights, key, Priority::Prefetch, None));
        let now = Instant::now();
        let run = flights.next_to_send(now, all).unwrap().1;
        assert_eq!(run.len() as u64 * BYTES, TOGETHER);
        assert_eq!(flights.next_to_send(now, all), None, "the window is full");
        begin(&mut flights, 2000, Priority::Read, Some("a"));
        assert_eq!(flights.next_to_send(now, all).unwrap().1, [2000]);
    }

    #[test]
    fn of_a_request_that_fails_each_chunk_is_asked_for_by_itself() {
        let mut flights = Chunks::new();
        (0..3).for_each(|key| begin(&mut flights, key, Priority::Read, Some("a")));
        let now = Instant::now();
        let (id, run) = flights.next_to_send(now, all).unwrap();
        assert_eq!(run, [0, 1, 2]);
        assert_eq!(flights.land(1), ["a"]);
        let answered = flights.answered(id);
        assert!(matches!(
            answered[..],
            [(0, Some(_)), (1, None), (2, Some(_))]
        ));
        [0, 2].into_iter().for_each(|key| flights.separate(key));
        let mut runs = [(); 2].map(|()| flights.next_to_send(now, all).unwrap().1);
        runs.sort_unstable();
        assert_eq!(runs, [[0], [2]]);
        assert_eq!(flights.out, 2 * BYTES);
    }

    #[test]
    fn a_wrong_frame_is_asked_for_twice_again() {
        let mut flights = Chunks::new();
        begin(&mut flights, 1, Priority::Read, Some("a"));
        for again in [true, true, false] {
            let (id, _) = flights.next_to_send(Instant::now(), never).unwrap();
            flights.answered(id);
            assert_eq!(flights.was_wrong(1), again);
        }
        assert_eq!(flights.land(1), ["a"]);
        assert_eq!(flights.out, 0);
    }

    #[test]
    fn a_store_that_asks_for_patience_gets_it_and_prefetches_are_dropped() {
        let mut flights = Chunks::new();
        begin(&mut flights, 1, Priority::Read, Some("a"));
        begin(&mut flights, 2, Priority::Prefetch, None);
        let now = Instant::now();
        for _ in 0..2 {
            let (id, _) = flights.next_to_send(now, never).unwrap();
            flights.answered(id);
        }
        assert!(flights.rest(1, now) && !flights.rest(2, now));
        flights.wake(now);
        assert_eq!(flights.next_to_send(now, never), None);
        flights.wake(now + LONGEST_REST);
        assert!(flights.next_to_send(now, never).is_some());
        assert_eq!(flights.out, BYTES);
    }

    #[test]
    fn who_waits_too_long_is_let_go_and_nothing_is_asked_for_nobody() {
        let mut flights = Chunks::new();
        begin(&mut flights, 1, Priority::Read, Some("old"));
        begin(&mut flights, 1, Priority::Read, Some("new"));
        begin(&mut flights, 2, Priority::Read, Some("old"));
        begin(&mut flights, 3, Priority::Prefetch, None);
        let mut expired = flights.expire(|waiter| *waiter == "old");
        expired.sort_unstable();
        assert_eq!(expired, [(1, "old"), (2, "old")]);
        assert_eq!(sent(&mut flights), [1, 3]);
    }

    #[test]
    fn a_serial_number_tells_a_flight_from_a_later_one() {
        let mut flights = Chunks::new();
        let first = flights.start(1, Priority::Read, Some("a"));
        assert_eq!(flights.land_all(|key| *key == 1), ["a"]);
        let second = flights.start(1, Priority::Read, None);
        assert!(!flights.is_current(1, first) && flights.is_current(1, second));
    }
}
