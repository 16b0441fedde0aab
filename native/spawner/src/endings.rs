//! Control groups of ended sandboxes, removed when endings pause.
//!
//! When a memory group goes, the kernel looks at the LRU lists of every superblock there is, five for each live sandbox: in the middle of ending
//! thousands, that was a quarter of all work. Once their mounts are gone there is next to nothing to look at. Where as many sandboxes begin as end,
//! waiting saves nothing: groups that were removed a thousand at a time held up everybody for seconds.

use std::collections::HashSet;
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// A pause in which no sandbox ended.
const PAUSE: Duration = Duration::from_millis(100);
/// Endings may come without a pause; groups wait no longer than this.
const LONGEST_WAIT: Duration = Duration::from_secs(10);

#[derive(Default)]
pub struct Endings {
    emptied: Mutex<Emptied>,
    arrived: Condvar,
}

/// Sandboxes of which nothing is left but their groups.
#[derive(Default)]
struct Emptied {
    ids: Vec<String>,
    times: Option<Times>,
    /// Sandboxes that began since the first of these ended.
    begun: usize,
}

#[derive(Clone, Copy)]
struct Times {
    first: Instant,
    last: Instant,
}

impl Times {
    /// When the groups are to be removed, if nothing more arrives. `fewer`: how many sandboxes there are is falling.
    fn due(self, fewer: bool) -> Instant {
        if fewer {
            (self.last + PAUSE).min(self.first + LONGEST_WAIT)
        } else {
            self.first + PAUSE
        }
    }
}

impl Endings {
    /// Leaves a sandbox's groups to [`Endings::next`].
    pub fn leave(&self, id: &str) {
        let mut emptied = self.lock();
        emptied.ids.push(id.to_owned());
        let last = Instant::now();
        let first = match emptied.times {
            Some(times) => times.first,
            None => {
                emptied.begun = 0;
                last
            }
        };
        emptied.times = Some(Times { first, last });
        self.arrived.notify_one();
    }

    /// Counts a sandbox that begins.
    pub fn begin(&self) {
        self.lock().begun += 1;
    }

    /// Waits for the next pause; the sandboxes whose groups are to be removed then.
    pub fn next(&self) -> Vec<String> {
        let mut emptied = self.lock();
        loop {
            let Some(times) = emptied.times else {
                emptied = self
                    .arrived
                    .wait(emptied)
                    .unwrap_or_else(PoisonError::into_inner);
                continue;
            };
            let fewer = emptied.begun * 2 < emptied.ids.len();
            let left = times.due(fewer).saturating_duration_since(Instant::now());
            if left.is_zero() {
                return std::mem::take(&mut *emptied).ids;
            }
            drop(emptied);
            std::thread::sleep(left.min(PAUSE));
            emptied = self.lock();
        }
    }

    /// The sandboxes whose groups are about to be removed.
    pub fn waiting(&self) -> HashSet<String> {
        self.lock().ids.iter().cloned().collect()
    }

    fn lock(&self) -> MutexGuard<'_, Emptied> {
        self.emptied.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn groups_of_all_that_ended_without_a_pause_go_together() {
        let endings = Endings::default();
        endings.leave("a");
        endings.leave("b");
        assert!(endings.waiting().contains("a"));
        assert_eq!(endings.next(), ["a", "b"]);
        assert!(endings.waiting().is_empty());
    }

    #[test]
    fn no_pause_is_waited_for_too_long() {
        let first = Instant::now();
        let last = first + LONGEST_WAIT;
        assert_eq!(Times { first, last }.due(true), first + LONGEST_WAIT);
    }

    #[test]
    fn where_as_many_begin_as_end_the_first_pause_is_not_waited_for() {
        let first = Instant::now();
        let last = first + PAUSE / 2;
        assert_eq!(Times { first, last }.due(true), last + PAUSE);
        assert_eq!(Times { first, last }.due(false), first + PAUSE);
    }
}
