//! Deadlines, in order. A cancelled one is removed at once, so that 100,000 short commands with long timeouts leave nothing behind.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

/// What is due.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Timer {
    /// The command has run for as long as it may.
    CommandTimeout(u64),
    /// The leader has been dead for so long that what holds its pipes isn't waited for any more.
    DrainEnded(u64),
    /// Cgroups that were still busy may be removable now.
    SweepGroups,
    /// Time to give memory back.
    Trim,
    /// Time to look whether the own OOM score may be had back.
    SettleScore,
}

/// Names a timer that was set.
pub type TimerKey = (Instant, u64);

#[derive(Default)]
pub struct Timers {
    due: BTreeMap<TimerKey, Timer>,
    next: u64,
}

impl Timers {
    /// Sets a timer; one so far away that the clock can't say is never due.
    pub fn set(&mut self, delay: Duration, timer: Timer) -> Option<TimerKey> {
        let key = (Instant::now().checked_add(delay)?, self.next);
        self.next += 1;
        self.due.insert(key, timer);
        Some(key)
    }

    pub fn cancel(&mut self, key: Option<TimerKey>) {
        if let Some(key) = key {
            self.due.remove(&key);
        }
    }

    /// Milliseconds until the first timer, rounded up; -1 without one.
    pub fn timeout_ms(&self) -> i32 {
        let Some(((at, _), _)) = self.due.first_key_value() else {
            return -1;
        };
        let left = at
            .saturating_duration_since(Instant::now())
            .as_micros()
            .div_ceil(1000);
        i32::try_from(left).unwrap_or(i32::MAX)
    }

    /// The next timer whose time has come.
    pub fn pop_due(&mut self) -> Option<Timer> {
        let entry = self.due.first_entry()?;
        if entry.key().0 > Instant::now() {
            return None;
        }
        Some(entry.remove())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn timers_come_in_the_order_of_their_time_and_cancelled_ones_not_at_all() {
        let mut timers = Timers::default();
        assert_eq!(timers.timeout_ms(), -1);
        timers.set(Duration::ZERO, Timer::CommandTimeout(1));
        let second = timers.set(Duration::ZERO, Timer::CommandTimeout(2));
        timers.set(Duration::ZERO, Timer::Trim);
        timers.cancel(second);
        assert_eq!(timers.pop_due(), Some(Timer::CommandTimeout(1)));
        assert_eq!(timers.pop_due(), Some(Timer::Trim));
        assert_eq!(timers.pop_due(), None);
    }

    #[test]
    fn a_timer_in_the_future_is_not_due() {
        let mut timers = Timers::default();
        timers.set(Duration::from_secs(100), Timer::SweepGroups);
        assert_eq!(timers.pop_due(), None);
        assert!(timers.timeout_ms() > 90_000);
        assert_eq!(timers.set(Duration::MAX, Timer::Trim), None);
    }
}
