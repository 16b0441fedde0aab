//! A child in the memory of its parent, which goes on meanwhile, and the bare system calls that are all it may make.
//!
//! Copying a process for a child that executes something else at once, and the faults of both on what was copied, cost more than the rest of a start. In
//! shared memory the child must not allocate, take a lock, or call a function of libc, whose errno is the parent's; what it needs is prepared before, and
//! stays until it has executed or ended.

use std::io;

/// The result of a bare system call: a value, or minus errno.
#[derive(Clone, Copy)]
pub struct Outcome(pub isize);

impl Outcome {
    /// The value, or errno.
    ///
    /// # Errors
    /// The call failed.
    pub fn result(self) -> Result<isize, i32> {
        if self.0 < 0 {
            Err(-self.0 as i32)
        } else {
            Ok(self.0)
        }
    }
}

/// A bare system call.
///
/// # Safety
/// The arguments must be what the call takes.
pub unsafe fn system_call(number: libc::c_long, arguments: [usize; 6]) -> Outcome {
    let result: isize;
    // SAFETY: the caller's promise; the kernel clobbers rcx and r11 only.
    unsafe {
        std::arch::asm!(
            "syscall",
            inlateout("rax") number as isize => result,
            in("rdi") arguments[0],
            in("rsi") arguments[1],
            in("rdx") arguments[2],
            in("r10") arguments[3],
            in("r8") arguments[4],
            in("r9") arguments[5],
            lateout("rcx") _,
            lateout("r11") _,
            options(nostack)
        );
    }
    Outcome(result)
}

/// `given`, with zeros behind it.
#[doc(hidden)]
pub fn padded(given: &[usize]) -> [usize; 6] {
    let mut all = [0; 6];
    all[..given.len()].copy_from_slice(given);
    all
}

/// `call!(number, argument…)`: a bare system call with each argument as a word.
#[macro_export]
macro_rules! call {
    ($number:expr) => {
        $crate::system_call($number, [0; 6])
    };
    ($number:expr, $($argument:expr),+) => {
        $crate::system_call($number, $crate::padded(&[$($argument as usize),+]))
    };
}

/// What clone3(2) takes. Zero means unused.
#[repr(C, align(8))]
#[derive(Default)]
pub struct CloneArgs {
    pub flags: u64,
    pub pidfd: u64,
    pub child_tid: u64,
    pub parent_tid: u64,
    pub exit_signal: u64,
    pub stack: u64,
    pub stack_size: u64,
    pub tls: u64,
    pub set_tid: u64,
    pub set_tid_size: u64,
    pub cgroup: u64,
}

/// linux/sched.h; libc's constant has another type.
pub const CLONE_INTO_CGROUP: u64 = 0x2_0000_0000;

/// Memory that a child runs on, in units aligned as the call convention wants a stack.
pub struct Stack(Box<[std::cell::UnsafeCell<u128>]>);

// SAFETY: only the one child that runs on it touches its bytes.
unsafe impl Send for Stack {}

impl Stack {
    #[must_use]
    pub fn new(bytes: usize) -> Self {
        Stack((0..bytes / 16).map(|_| 0.into()).collect())
    }

    /// Lets a child of `arguments` run on it.
    pub fn lend(&self, arguments: &mut CloneArgs) {
        arguments.stack = self.0.as_ptr() as u64;
        arguments.stack_size = (self.0.len() * 16) as u64;
    }
}

/// Starts a child that shares this process's memory, in `entry(argument)`. Returns its pid. `words`: the fifth and sixth argument of the system call, which
/// the kernel ignores and a seccomp filter may look at.
///
/// # Errors
/// What clone3 says.
///
/// # Safety
/// `arguments` must ask for CLONE_VM, with a stack that nothing else uses, and `argument` must stay as it is until the child has executed another program
/// or ended.
pub unsafe fn start<T>(
    arguments: &CloneArgs,
    words: (u64, u64),
    entry: unsafe extern "C" fn(*const T) -> !,
    argument: *const T,
) -> io::Result<i32> {
    let result: isize;
    // SAFETY: in the parent this is a system call like any other. The child comes back on its own stack, where nothing of this frame is; it goes to
    // `entry`, which never returns, with the argument that r12 still holds.
    unsafe {
        std::arch::asm!(
            "syscall",
            "test rax, rax",
            "jnz 2f",
            "xor ebp, ebp",
            "mov rdi, r12",
            "call r13",
            "ud2",
            "2:",
            inlateout("rax") libc::SYS_clone3 as isize => result,
            in("rdi") arguments,
            in("rsi") std::mem::size_of::<CloneArgs>(),
            in("rdx") 0,
            in("r10") 0,
            in("r8") words.0,
            in("r9") words.1,
            in("r12") argument,
            in("r13") entry,
            lateout("rcx") _,
            lateout("r11") _,
        );
    }
    Outcome(result)
        .result()
        .map(|pid| pid as i32)
        .map_err(io::Error::from_raw_os_error)
}

#[cfg(test)]
mod tests {
    use super::*;

    unsafe extern "C" fn leave(word: *const u32) -> ! {
        // SAFETY: the word is the test's, which waits for this child.
        unsafe {
            call!(libc::SYS_exit_group, *word);
            std::arch::asm!("ud2", options(noreturn))
        }
    }

    #[test]
    fn a_child_sees_its_argument_and_ends() {
        let (stack, word, mut status) = (Stack::new(16 << 10), 7_u32, 0);
        let mut arguments = CloneArgs {
            flags: libc::CLONE_VM as u64,
            exit_signal: libc::SIGCHLD as u64,
            ..CloneArgs::default()
        };
        stack.lend(&mut arguments);
        // SAFETY: the stack and the word stay until the child was waited for.
        let pid = unsafe { start(&arguments, (0, 0), leave, &raw const word) }.unwrap();
        // SAFETY: waitpid writes one int.
        assert_eq!(unsafe { libc::waitpid(pid, &mut status, 0) }, pid);
        assert_eq!(libc::WEXITSTATUS(status), 7);
    }

    #[test]
    fn a_refused_clone_is_an_error() {
        let arguments = CloneArgs::default();
        let word = 0;
        // SAFETY: a stack of no size is refused.
        let started = unsafe {
            start(
                &CloneArgs {
                    flags: u64::MAX,
                    ..arguments
                },
                (0, 0),
                leave,
                &raw const word,
            )
        };
        assert_eq!(started.unwrap_err().raw_os_error(), Some(libc::EINVAL));
    }
}
