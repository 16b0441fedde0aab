//! How long to wait before a process that died is started again.

use std::time::Duration;

const FIRST: Duration = Duration::from_millis(100);
const LONGEST: Duration = Duration::from_secs(5);
/// A process that lived this long was well: its next death counts as the first.
const WELL: Duration = Duration::from_secs(10);

#[derive(Debug)]
pub struct Backoff {
    next: Duration,
}

impl Backoff {
    pub fn new() -> Self {
        Backoff { next: FIRST }
    }

    /// The pause after a life of this length.
    pub fn after(&mut self, life: Duration) -> Duration {
        if life >= WELL {
            self.next = FIRST;
        }
        let pause = self.next;
        self.next = (2 * pause).min(LONGEST);
        pause
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pauses(lives: &[u64]) -> Vec<u128> {
        let mut backoff = Backoff::new();
        lives
            .iter()
            .map(|life| backoff.after(Duration::from_secs(*life)).as_millis())
            .collect()
    }

    #[test]
    fn quick_deaths_double_the_pause_up_to_five_seconds() {
        assert_eq!(
            pauses(&[0; 8]),
            [100, 200, 400, 800, 1600, 3200, 5000, 5000]
        );
    }

    #[test]
    fn a_life_of_ten_seconds_starts_over() {
        assert_eq!(pauses(&[0, 9, 10, 0]), [100, 200, 100, 200]);
    }
}
