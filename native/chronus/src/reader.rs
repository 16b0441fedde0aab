//! Reading files beside the loop: a child that shares this process's memory fetches what may be long in coming, and its death says that it is there.
//!
//! Not a thread: chronus forks (for builtins), and a copy must not find a lock that a thread holds which isn't in it. Not a copy either, which costs more than
//! the read. [`bare`] says what such a child may do.

use std::cell::UnsafeCell;
use std::fs::File;
use std::io;
use std::os::fd::{AsRawFd, RawFd};

use bare::{call, CloneArgs, Stack};

/// The child's functions are shallow.
const STACK_BYTES: usize = 16 << 10;

/// One file, and what the child has made of it.
struct Item {
    /// In the child's own table.
    fd: RawFd,
    content: Vec<u8>,
    /// errno; 0: it was read to its end, or as far as there is room.
    failed: i32,
}

struct Job {
    /// The child's while it lives. In the order of their descriptors.
    items: UnsafeCell<Vec<Item>>,
    stack: Stack,
}

/// A child that reads.
pub struct Reader {
    pub pid: i32,
    /// None only while this value is taken apart.
    job: Option<Box<Job>>,
}

impl Reader {
    /// Has open files read, each up to so many bytes. `cookie` is what the seccomp filter wants to see.
    pub fn start(files: &[(&File, usize)], cookie: (u64, u64)) -> io::Result<Reader> {
        let items = files.iter().map(|(file, most)| Item {
            fd: file.as_raw_fd(),
            content: Vec::with_capacity(*most),
            // Of a child that is killed before it comes to say more.
            failed: libc::EIO,
        });
        let mut items: Vec<Item> = items.collect();
        items.sort_by_key(|item| item.fd);
        let job = Box::new(Job {
            items: items.into(),
            stack: Stack::new(STACK_BYTES),
        });
        let mut arguments = CloneArgs {
            flags: libc::CLONE_VM as u64,
            exit_signal: libc::SIGCHLD as u64,
            ..CloneArgs::default()
        };
        job.stack.lend(&mut arguments);
        // SAFETY: the job stays where it is until `finish`, when the child is dead; a reader that is dropped before leaves it there.
        let pid = unsafe { bare::start(&arguments, cookie, enter, &raw const *job) }?;
        Ok(Reader {
            pid,
            job: Some(job),
        })
    }

    /// The contents, or errnos, in the order of the files' descriptors. To be called when the child is dead.
    pub fn finish(mut self) -> Vec<Result<Vec<u8>, i32>> {
        let items = self.job.take().map(|job| job.items.into_inner());
        items
            .into_iter()
            .flatten()
            .map(|item| match item.failed {
                0 => Ok(item.content),
                errno => Err(errno),
            })
            .collect()
    }
}

impl Drop for Reader {
    fn drop(&mut self) {
        if let Some(job) = self.job.take() {
            // The child may still write there.
            Box::leak(job);
        }
    }
}

/// The child's first function. Never returns.
unsafe extern "C" fn enter(job: *const Job) -> ! {
    // SAFETY: the job stays until this child is dead, and nobody else looks at its items before; bare system calls.
    unsafe {
        let items = &mut *(*job).items.get();
        // The other copies of descriptors that it was born with would keep pipes open whose readers wait for the end.
        let mut first = 0;
        for item in items.iter() {
            if item.fd > first {
                call!(libc::SYS_close_range, first, item.fd - 1, 0);
            }
            first = item.fd + 1;
        }
        call!(libc::SYS_close_range, first, u32::MAX, 0);
        for item in items.iter_mut() {
            item.failed = read(item).err().unwrap_or(0);
        }
        call!(libc::SYS_exit_group, 0);
        std::arch::asm!("ud2", options(noreturn))
    }
}

unsafe fn read(item: &mut Item) -> Result<(), i32> {
    loop {
        let (length, capacity) = (item.content.len(), item.content.capacity());
        if length == capacity {
            return Ok(());
        }
        // SAFETY: the buffer is writable for the rest of its capacity, of which the kernel has filled `count` bytes.
        unsafe {
            let place = item.content.as_mut_ptr().add(length);
            let count = call!(libc::SYS_read, item.fd, place, capacity - length).result()?;
            if count == 0 {
                return Ok(());
            }
            item.content.set_len(length + count as usize);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(files: &[(&File, usize)]) -> Vec<Result<Vec<u8>, i32>> {
        let reader = Reader::start(files, (0, 0)).unwrap();
        let mut status = 0;
        // SAFETY: waitpid writes one int.
        let waited = unsafe { libc::waitpid(reader.pid, &mut status, 0) };
        assert_eq!((waited, status), (reader.pid, 0));
        reader.finish()
    }

    #[test]
    fn files_are_read_whole_or_as_far_as_there_is_room() {
        let path = std::env::temp_dir().join(format!("chronus-reader-{}", std::process::id()));
        std::fs::write(&path, vec![b'x'; 100_000]).unwrap();
        let (one, two) = (File::open(&path).unwrap(), File::open(&path).unwrap());
        std::fs::remove_file(path).unwrap();
        let found = read(&[(&one, 100_001), (&two, 10)]);
        assert_eq!(found, [Ok(vec![b'x'; 100_000]), Ok(vec![b'x'; 10])]);
    }

    #[test]
    fn a_read_that_fails_says_how() {
        let memory = File::open("/proc/self/mem").unwrap();
        assert_eq!(read(&[(&memory, 10)]), [Err(libc::EIO)]);
    }
}
