//! Which sandboxes there are, in which slot, and what is being done to each. The kernel's objects are the truth; this is what the running spawner
//! knows of them.

use std::collections::HashMap;
use std::os::fd::OwnedFd;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};

use crate::node::Node;
use crate::sysapi;

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum State {
    Creating,
    Live,
    Dead,
    Ending,
}

#[derive(Clone)]
pub struct Entry {
    pub slot: Option<u32>,
    pub pid: i32,
    pub pidfd: Option<Arc<OwnedFd>>,
    pub state: State,
}

#[derive(Default)]
struct Table {
    entries: HashMap<String, Entry>,
    used: HashMap<u32, ()>,
    next: u32,
}

pub struct Registry {
    /// They number the id ranges and the sockets.
    slots: u32,
    table: Mutex<Table>,
    changed: Condvar,
}

#[derive(Debug, PartialEq, Eq)]
pub enum Refusal {
    Exists,
    NoSlot,
}

impl Registry {
    pub fn with_slots(slots: u32) -> Self {
        Registry {
            slots,
            table: Mutex::default(),
            changed: Condvar::new(),
        }
    }

    fn table(&self) -> MutexGuard<'_, Table> {
        // A panic aborts the process, so a poisoned lock can't be seen; the table is plain data in any case.
        self.table.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Claims the name and a slot for a new sandbox.
    pub fn begin(&self, id: &str) -> Result<u32, Refusal> {
        let mut table = self.table();
        if table.entries.contains_key(id) {
            return Err(Refusal::Exists);
        }
        // Round robin: a slot that was just freed rests as long as possible.
        let start = table.next;
        let slot = (0..self.slots)
            .map(|step| (start + step) % self.slots)
            .find(|slot| !table.used.contains_key(slot))
            .ok_or(Refusal::NoSlot)?;
        table.next = (slot + 1) % self.slots;
        table.used.insert(slot, ());
        table.entries.insert(
            id.to_owned(),
            Entry {
                slot: Some(slot),
                pid: 0,
                pidfd: None,
                state: State::Creating,
            },
        );
        Ok(slot)
    }

    pub fn created(&self, id: &str, pid: i32, pidfd: Arc<OwnedFd>) {
        if let Some(entry) = self.table().entries.get_mut(id) {
            entry.pid = pid;
            entry.pidfd = Some(pidfd);
            entry.state = State::Live;
        }
        self.changed.notify_all();
    }

    /// Waits until nothing else is being done to the sandbox and claims it for ending, to be followed by [`Registry::remove`] or
    /// [`Registry::not_ended`]. A name that no sandbox has is claimed as well: nobody may begin one while what bears it is swept.
    pub fn begin_end(&self, id: &str) -> Entry {
        let mut table = self.table();
        loop {
            match table.entries.get_mut(id) {
                None => {
                    let entry = Entry {
                        slot: None,
                        pid: 0,
                        pidfd: None,
                        state: State::Ending,
                    };
                    table.entries.insert(id.to_owned(), entry.clone());
                    return entry;
                }
                Some(entry) if matches!(entry.state, State::Live | State::Dead) => {
                    entry.state = State::Ending;
                    return entry.clone();
                }
                Some(_) => {
                    table = self
                        .changed
                        .wait(table)
                        .unwrap_or_else(PoisonError::into_inner)
                }
            }
        }
    }

    /// Gives up the claim of an end that didn't come through: a process of the sandbox is still there, under ids that nobody else may get.
    pub fn not_ended(&self, id: &str) {
        if let Some(entry) = self.table().entries.get_mut(id) {
            entry.state = State::Dead;
        }
        self.changed.notify_all();
    }

    pub fn remove(&self, id: &str) {
        let mut table = self.table();
        if let Some(slot) = table.entries.remove(id).and_then(|entry| entry.slot) {
            table.used.remove(&slot);
        }
        drop(table);
        self.changed.notify_all();
    }

    /// Notes the death of a sandbox's first process; true if nobody is ending it anyway.
    pub fn died(&self, id: &str) -> bool {
        match self.table().entries.get_mut(id) {
            Some(entry) if entry.state == State::Live => {
                entry.state = State::Dead;
                true
            }
            _ => false,
        }
    }

    pub fn get(&self, id: &str) -> Option<Entry> {
        self.table().entries.get(id).cloned()
    }

    pub fn list(&self) -> Vec<(String, Entry)> {
        self.table()
            .entries
            .iter()
            .map(|(id, entry)| (id.clone(), entry.clone()))
            .collect()
    }

    /// Finds what earlier spawners of this instance made; returns the live ones with their descriptors.
    pub fn recover(&self, node: &Node) -> Vec<(String, Arc<OwnedFd>)> {
        let mut names = node.cgroups.list();
        names.extend(node.scratch.list().unwrap_or_default());
        names.sort();
        names.dedup();
        let mut live = Vec::new();
        let mut table = self.table();
        for id in names {
            let record = node.scratch.read_record(&id);
            if record.is_none() && !node.cgroups.list().contains(&id) {
                // Kept on purpose after its sandbox failed: it has no process and no slot.
                continue;
            }
            let process =
                record.filter(|record| sysapi::start_time(record.pid) == Some(record.start_time));
            let pidfd = process
                .and_then(|record| sysapi::pidfd_open(record.pid).ok())
                .map(Arc::new);
            if let Some(pidfd) = &pidfd {
                live.push((id.clone(), pidfd.clone()));
            }
            let slot = record.map(|record| record.slot);
            if let Some(slot) = slot {
                table.used.insert(slot, ());
            }
            let state = if pidfd.is_some() {
                State::Live
            } else {
                State::Dead
            };
            table.entries.insert(
                id,
                Entry {
                    slot,
                    pid: process.map_or(0, |record| record.pid),
                    pidfd,
                    state,
                },
            );
        }
        live
    }

    pub fn has_slot(&self, slot: u32) -> bool {
        self.table().used.contains_key(&slot)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_and_a_slot_are_claimed_once() {
        let registry = Registry::with_slots(3);
        assert_eq!(registry.begin("sb-a"), Ok(0));
        assert_eq!(registry.begin("sb-a"), Err(Refusal::Exists));
        assert_eq!(registry.begin("sb-b"), Ok(1));
        registry.remove("sb-a");
        assert_eq!(registry.begin("sb-c"), Ok(2), "a slot just freed rests");
    }

    #[test]
    fn an_end_waits_for_the_creation() {
        let registry = Arc::new(Registry::with_slots(3));
        assert_eq!(registry.begin("sb-a"), Ok(0));
        let other = registry.clone();
        let waiting = std::thread::spawn(move || other.begin_end("sb-a").pid);
        let (end, _) = sysapi::pipe().unwrap();
        registry.created("sb-a", 7, Arc::new(end));
        assert_eq!(waiting.join().unwrap(), 7);
        assert!(
            !registry.died("sb-a"),
            "its death is no news while it is being ended"
        );
    }

    #[test]
    fn while_what_bears_a_name_is_swept_nobody_begins_a_sandbox_of_it() {
        let registry = Registry::with_slots(3);
        assert_eq!(registry.begin_end("sb-a").slot, None);
        assert_eq!(registry.begin("sb-a"), Err(Refusal::Exists));
        registry.remove("sb-a");
        assert_eq!(registry.begin("sb-a"), Ok(0));
        assert!(registry.has_slot(0));
    }

    #[test]
    fn a_slot_stays_taken_until_every_process_has_ended() {
        let registry = Registry::with_slots(3);
        assert_eq!(registry.begin("sb-a"), Ok(0));
        let (end, _) = sysapi::pipe().unwrap();
        registry.created("sb-a", 7, Arc::new(end));
        assert_eq!(registry.begin_end("sb-a").slot, Some(0));
        registry.not_ended("sb-a");
        assert!(registry.has_slot(0));
        assert!(!registry.died("sb-a"), "it is being ended, for all to know");
        assert_eq!(registry.begin_end("sb-a").slot, Some(0), "once more");
        registry.remove("sb-a");
        assert!(!registry.has_slot(0));
    }
}
