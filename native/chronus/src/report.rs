//! How a child tells why it could not start its program: through a page that it shares with chronus until it executes.
//!
//! A pipe would cost each command five system calls and a descriptor; this costs none.

use std::io;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU32, Ordering};

const PAGE: usize = 4096;
const SLOTS_PER_PAGE: usize = PAGE / size_of::<Slot>();

/// What the child was doing when it failed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Stage {
    Fork,
    Stdio,
    Users,
    UnknownUser,
    UnknownGroup,
    Credentials,
    Terminal,
    Directory,
    NoNewPrivs,
    Execute,
}

const STAGES: [Stage; 10] = [
    Stage::Fork,
    Stage::Stdio,
    Stage::Users,
    Stage::UnknownUser,
    Stage::UnknownGroup,
    Stage::Credentials,
    Stage::Terminal,
    Stage::Directory,
    Stage::NoNewPrivs,
    Stage::Execute,
];

#[repr(C)]
struct Slot {
    /// 0: nothing failed; else the stage's index + 1.
    stage: AtomicU32,
    errno: AtomicU32,
}

/// A slot that one child writes to, at most once.
#[derive(Debug, Clone, Copy)]
pub struct Report {
    slot: NonNull<Slot>,
}

impl Report {
    /// In the child.
    pub fn fail(self, stage: Stage, errno: i32) {
        // SAFETY: pages are never unmapped, so the slot is there.
        let slot = unsafe { self.slot.as_ref() };
        slot.errno.store(errno as u32, Ordering::Relaxed);
        slot.stage.store(stage as u32 + 1, Ordering::Release);
    }

    /// In the parent, once the child is dead.
    fn outcome(self) -> Option<(Stage, i32)> {
        // SAFETY: as above.
        let slot = unsafe { self.slot.as_ref() };
        let stage = slot.stage.load(Ordering::Acquire).checked_sub(1)?;
        Some((
            *STAGES.get(stage as usize)?,
            slot.errno.load(Ordering::Relaxed) as i32,
        ))
    }
}

/// The slots that no child uses.
#[derive(Default)]
pub struct Reports {
    free: Vec<Report>,
}

impl Reports {
    /// A cleared slot.
    pub fn take(&mut self) -> io::Result<Report> {
        if self.free.is_empty() {
            self.add_page()?;
        }
        let report = self
            .free
            .pop()
            .ok_or_else(|| io::Error::from_raw_os_error(libc::ENOMEM))?;
        // SAFETY: pages are never unmapped, so the slot is there.
        unsafe { report.slot.as_ref() }
            .stage
            .store(0, Ordering::Relaxed);
        Ok(report)
    }

    /// Takes a slot back from a dead child, with what it reported.
    pub fn give_back(&mut self, report: Report) -> Option<(Stage, i32)> {
        self.free.push(report);
        report.outcome()
    }

    fn add_page(&mut self) -> io::Result<()> {
        let protection = libc::PROT_READ | libc::PROT_WRITE;
        // SAFETY: an anonymous mapping at an address of the kernel's choice.
        let page = unsafe {
            libc::mmap(
                std::ptr::null_mut(),
                PAGE,
                protection,
                libc::MAP_SHARED | libc::MAP_ANONYMOUS,
                -1,
                0,
            )
        };
        if page == libc::MAP_FAILED {
            return Err(io::Error::last_os_error());
        }
        let first = page.cast::<Slot>();
        // SAFETY: the page has room for that many slots, is zeroed (a valid Slot), and stays mapped.
        self.free.extend(
            (0..SLOTS_PER_PAGE)
                .filter_map(|index| NonNull::new(unsafe { first.add(index) }))
                .map(|slot| Report { slot }),
        );
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_slot_tells_what_failed_and_is_clean_when_it_is_used_again() {
        let mut reports = Reports::default();
        let report = reports.take().unwrap();
        report.fail(Stage::Execute, libc::ENOENT);
        assert_eq!(
            reports.give_back(report),
            Some((Stage::Execute, libc::ENOENT))
        );
        let again = reports.take().unwrap();
        assert_eq!(reports.give_back(again), None);
    }

    #[test]
    fn stages_survive_their_number() {
        for (index, stage) in STAGES.iter().enumerate() {
            assert_eq!(*stage as usize, index);
        }
    }
}
