//! Control groups of ended sandboxes, removed when endings pause.
//!
//! When a memory group goes, the kernel looks at the LRU lists of every superblock there is, five for each live sandbox: in the middle of ending
//! thousands, that was a quarter of all work. Once their mounts are gone there is next to nothing to look at.

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
}

#[derive(Clone, Copy)]
struct Times {
    first: Instant,
    last: Instant,
}

impl Times {
    /// When the groups are to be removed, if nothing more arrives.
    fn due(self) -> Instant {
        (self.last + PAUSE).min(self.first + LONGEST_WAIT)
    }
}

impl Endings {
    /// Leaves a sandbox's groups to [`Endings::next`].
    pub fn leave(&self, id: &str) {
        let mut emptied = self.lock();
        emptied.ids.push(id.to_owned());
        let last = Instant::now();
        let first = emptied.times.map_or(last, |times| times.first);
        emptied.times = Some(Times { first, last });
        self.arrived.notify_one();
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
            let left = times.due().saturating_duration_since(Instant::now());
            if left.is_zero() {
                return std::mem::take(&mut *emptied).ids;
            }
            drop(emptied);
            std::thread::sleep(left);
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
        assert_eq!(Times { first, last }.due(), first + LONGEST_WAIT);
    }
}
