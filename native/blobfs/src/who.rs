//! Which sandbox reads: found by the cgroup of the task that the kernel names in a request.

use std::collections::HashMap;
use std::fs;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

/// What the names of sandboxes, and of their cgroups, begin with.
const PREFIX: &str = "sb-";
/// How long an answer holds: numbers of tasks come again, but not so soon.
const VALID: Duration = Duration::from_secs(2);
/// Tasks that are remembered; with one more all are looked up again.
const KNOWN_MAX: usize = 8192;

/// The name of a sandbox.
pub type Name = Arc<str>;

/// Tasks that have read lately.
#[derive(Default)]
pub struct Who {
    known: Mutex<HashMap<u32, (Option<Name>, Instant)>>,
}

impl Who {
    /// The sandbox of a task; None for one that is in none, or gone.
    pub fn is(&self, task: u32, now: Instant) -> Option<Name> {
        let lock = || self.known.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some((name, since)) = lock().get(&task) {
            if now.saturating_duration_since(*since) < VALID {
                return name.clone();
            }
        }
        let name = fs::read_to_string(format!("/proc/{task}/cgroup"))
            .ok()
            .as_deref()
            .and_then(sandbox_in)
            .map(Name::from);
        let mut known = lock();
        if known.len() >= KNOWN_MAX {
            known.clear();
        }
        known.insert(task, (name.clone(), now));
        name
    }
}

/// The sandbox that a `/proc/<pid>/cgroup` speaks of.
fn sandbox_in(content: &str) -> Option<&str> {
    content
        .lines()
        .filter_map(|line| line.splitn(3, ':').nth(2))
        .find_map(|path| path.split('/').find(|part| part.starts_with(PREFIX)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_sandbox_is_a_part_of_the_path_in_any_hierarchy() {
        let hybrid = "9:name=systemd:/\n4:memory:/dsec/sb-e1-7f\n0::/dsec/sb-e1-7f/e3\n";
        assert_eq!(sandbox_in(hybrid), Some("sb-e1-7f"));
        assert_eq!(sandbox_in("0::/dsec/sb-a/e1\n"), Some("sb-a"));
        for other in ["", "0::/\n", "0::/dsec/x-sb-1\n", "broken"] {
            assert_eq!(sandbox_in(other), None, "{other}");
        }
    }

    #[test]
    fn a_task_is_looked_up_again_after_a_while() {
        let who = Who::default();
        let now = Instant::now();
        let name = Name::from("sb-x");
        who.known
            .lock()
            .unwrap()
            .insert(1, (Some(name.clone()), now));
        assert_eq!(who.is(1, now + VALID / 2), Some(name));
        assert_eq!(who.is(1, now + VALID), None, "no sandbox is in process 1");
    }
}
