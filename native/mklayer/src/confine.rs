//! The program gives up what it doesn't need before it reads the first byte of a source.
//!
//! All files are open by then, but those of a directory that is its source: there it may open what it finds, to read it, and look at it. What
//! remains: reading and writing them, removing or renaming the own outputs, memory that can't be executed, and exiting. A bug in the parser that
//! an archive exploits finds no way to open another file, start a program, reach a socket or make code of data. Three layers say so: seccomp
//! (which calls), Landlock (below which directory files may be read or the outputs removed), resource limits (how much).

use std::fs::File;
use std::io;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd, RawFd};
use std::path::Path;

use crate::error::{LayerError, Result};
use crate::limits::Limits;

/// Seconds of CPU: 64 GiB take about four minutes.
const CPU_SECONDS: u64 = 3600;
/// Open files: the archives of an image with the most layers or the deepest directory, the outputs, and some to spare.
const OPEN_FILES: u64 = 4096;
/// Bytes of address space beside what grows with the metadata: buffers, stack, the program itself.
const BASE_MEMORY: u64 = 512 << 20;

const ALLOWED: &[libc::c_long] = &[
    libc::SYS_read,
    libc::SYS_readv,
    libc::SYS_write,
    libc::SYS_writev,
    libc::SYS_lseek,
    libc::SYS_fsync,
    libc::SYS_close,
    libc::SYS_brk,
    libc::SYS_mremap,
    libc::SYS_munmap,
    libc::SYS_madvise,
    libc::SYS_unlinkat,
    libc::SYS_renameat2,
    #[cfg(target_arch = "x86_64")]
    libc::SYS_unlink,
    #[cfg(target_arch = "x86_64")]
    libc::SYS_rename,
    #[cfg(target_arch = "aarch64")]
    libc::SYS_renameat,
    libc::SYS_sigaltstack,
    libc::SYS_exit,
    libc::SYS_exit_group,
    // What abort() needs, so that a bug ends in a core signal and not in a riddle.
    libc::SYS_rt_sigaction,
    libc::SYS_rt_sigprocmask,
    libc::SYS_rt_sigreturn,
    libc::SYS_getpid,
    libc::SYS_gettid,
    libc::SYS_tgkill,
    libc::SYS_futex,
];

/// What reading a directory takes on top of that.
const ALLOWED_FOR_DIRECTORIES: &[libc::c_long] = &[
    libc::SYS_getdents64,
    libc::SYS_fstat,
    libc::SYS_newfstatat,
    libc::SYS_readlinkat,
    libc::SYS_flistxattr,
    libc::SYS_fgetxattr,
];
/// Of the flags of openat: anything but reading.
const WRITING: u32 = (libc::O_ACCMODE
    | libc::O_CREAT
    | libc::O_TRUNC
    | libc::O_APPEND
    | libc::O_TMPFILE & !libc::O_DIRECTORY) as u32;

/// What a run may do.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Scope {
    /// Use what is open.
    OpenFiles,
    /// Open, to read, what stands below the directory of this descriptor, and follow no link.
    Directory(RawFd),
}

#[cfg(target_arch = "x86_64")]
const AUDIT_ARCH: u32 = 0xC000_003E;
#[cfg(target_arch = "aarch64")]
const AUDIT_ARCH: u32 = 0xC000_00B7;

/// Offsets in `struct seccomp_data`; of an argument, its lower half.
const DATA_NUMBER: u32 = 0;
const DATA_ARCH: u32 = 4;
/// The low half of the third argument: the protection of mmap, the flags of openat.
const DATA_THIRD: u32 = 32;

/// From linux/landlock.h, the first version of its interface (5.13).
const LANDLOCK_RULE_PATH_BENEATH: libc::c_int = 1;
const LANDLOCK_EVERYTHING: u64 = (1 << 13) - 1;
const LANDLOCK_READ_FILE: u64 = 1 << 2;
const LANDLOCK_READ_DIR: u64 = 1 << 3;
const LANDLOCK_REMOVE_FILE: u64 = 1 << 5;
const LANDLOCK_MAKE_REG: u64 = 1 << 8;

#[repr(C)]
struct RulesetAttributes {
    handled_access_fs: u64,
}

#[repr(C, packed)]
struct PathBeneath {
    allowed_access: u64,
    parent_fd: libc::c_int,
}

/// Limits this process's resources and system calls, for good. Files may be removed and renamed in `outputs` (directories) only.
///
/// # Errors
/// The kernel refuses: then nothing must be read.
pub fn confine(limits: &Limits, scope: Scope, outputs: &[&Path]) -> Result<()> {
    limit(libc::RLIMIT_CORE, 0)?;
    limit(libc::RLIMIT_CPU, CPU_SECONDS)?;
    limit(libc::RLIMIT_NOFILE, OPEN_FILES)?;
    // Counts what the user has already: none may be added.
    limit(libc::RLIMIT_NPROC, 0)?;
    // The tree, the finished metadata, and what the allocator wastes while vectors grow.
    limit(
        libc::RLIMIT_AS,
        limits
            .meta_bytes
            .saturating_mul(4)
            .saturating_add(BASE_MEMORY),
    )?;
    limit(
        libc::RLIMIT_FSIZE,
        limits
            .data_bytes
            .max(limits.meta_bytes)
            .saturating_add(BASE_MEMORY),
    )?;
    // SAFETY: takes plain numbers.
    if unsafe { libc::prctl(libc::PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) } != 0 {
        return Err(failed("giving up new privileges"));
    }
    keep_to(scope, outputs)?;
    filter_system_calls(scope)
}

/// Closes the filesystem but for what the scope may read, and for removing and renaming in `outputs`. Kernels without Landlock go without: the other
/// layers stand.
fn keep_to(scope: Scope, outputs: &[&Path]) -> Result<()> {
    let attributes = RulesetAttributes {
        handled_access_fs: LANDLOCK_EVERYTHING,
    };
    // SAFETY: `attributes` outlives the call, and its size is the one that is told.
    let ruleset = unsafe {
        libc::syscall(
            libc::SYS_landlock_create_ruleset,
            &attributes,
            size_of::<RulesetAttributes>(),
            0,
        )
    };
    if ruleset < 0 {
        return match io::Error::last_os_error().raw_os_error() {
            Some(libc::ENOSYS | libc::EOPNOTSUPP) => Ok(()),
            _ => Err(failed("making a Landlock ruleset")),
        };
    }
    // SAFETY: the kernel has just given us this descriptor.
    let ruleset = unsafe { OwnedFd::from_raw_fd(ruleset as libc::c_int) };
    if let Scope::Directory(top) = scope {
        allow(&ruleset, top, LANDLOCK_READ_FILE | LANDLOCK_READ_DIR)?;
    }
    for directory in outputs {
        let opened = File::open(directory).map_err(|source| LayerError::Io {
            what: format!("opening {}", directory.display()),
            source,
        })?;
        let access = LANDLOCK_REMOVE_FILE | LANDLOCK_MAKE_REG;
        allow(&ruleset, opened.as_raw_fd(), access)?;
    }
    // SAFETY: takes plain numbers.
    if unsafe { libc::syscall(libc::SYS_landlock_restrict_self, ruleset.as_raw_fd(), 0) } != 0 {
        return Err(failed("entering the Landlock ruleset"));
    }
    Ok(())
}

fn allow(ruleset: &OwnedFd, directory: RawFd, access: u64) -> Result<()> {
    let rule = PathBeneath {
        allowed_access: access,
        parent_fd: directory,
    };
    // SAFETY: both descriptors are open, and `rule` outlives the call.
    let added = unsafe {
        libc::syscall(
            libc::SYS_landlock_add_rule,
            ruleset.as_raw_fd(),
            LANDLOCK_RULE_PATH_BENEATH,
            &rule,
            0,
        )
    };
    if added == 0 {
        Ok(())
    } else {
        Err(failed("adding a Landlock rule"))
    }
}

fn limit(resource: libc::__rlimit_resource_t, value: u64) -> Result<()> {
    let mut current = libc::rlimit {
        rlim_cur: 0,
        rlim_max: 0,
    };
    // SAFETY: `current` is a valid rlimit for the kernel to write to.
    if unsafe { libc::getrlimit(resource, &mut current) } != 0 {
        return Err(failed("reading a resource limit"));
    }
    let value = value.min(current.rlim_max);
    let wanted = libc::rlimit {
        rlim_cur: value,
        rlim_max: value,
    };
    // SAFETY: `wanted` is a valid rlimit that outlives the call.
    if unsafe { libc::setrlimit(resource, &wanted) } != 0 {
        return Err(failed("setting a resource limit"));
    }
    Ok(())
}

fn filter_system_calls(scope: Scope) -> Result<()> {
    let mut program = program(scope);
    let filter = libc::sock_fprog {
        len: program.len() as libc::c_ushort,
        filter: program.as_mut_ptr(),
    };
    // SAFETY: `filter` points to `program`, which outlives the call; the kernel copies it.
    if unsafe { libc::prctl(libc::PR_SET_SECCOMP, libc::SECCOMP_MODE_FILTER, &filter) } != 0 {
        return Err(failed("filtering system calls"));
    }
    Ok(())
}

fn program(scope: Scope) -> Vec<libc::sock_filter> {
    let load = |offset| instruction(libc::BPF_LD | libc::BPF_W | libc::BPF_ABS, offset, 0, 0);
    let jump =
        |test, value, yes, no| instruction(libc::BPF_JMP | test | libc::BPF_K, value, yes, no);
    let answer = |action| instruction(libc::BPF_RET | libc::BPF_K, action, 0, 0);

    let mut program = vec![
        load(DATA_ARCH),
        jump(libc::BPF_JEQ, AUDIT_ARCH, 1, 0),
        answer(libc::SECCOMP_RET_KILL_PROCESS),
        load(DATA_NUMBER),
        // Memory may be had, but none that can be executed.
        jump(libc::BPF_JEQ, libc::SYS_mmap as u32, 0, 4),
        load(DATA_THIRD),
        jump(libc::BPF_JSET, libc::PROT_EXEC as u32, 0, 1),
        answer(libc::SECCOMP_RET_KILL_PROCESS),
        answer(libc::SECCOMP_RET_ALLOW),
    ];
    let mut allowed = ALLOWED.to_vec();
    if matches!(scope, Scope::Directory(_)) {
        allowed.extend(ALLOWED_FOR_DIRECTORIES);
        // Without O_NOFOLLOW, or with a flag that is for writing: killed.
        program.extend([
            jump(libc::BPF_JEQ, libc::SYS_openat as u32, 0, 5),
            load(DATA_THIRD),
            jump(libc::BPF_JSET, WRITING, 2, 0),
            jump(libc::BPF_JSET, libc::O_NOFOLLOW as u32, 0, 1),
            answer(libc::SECCOMP_RET_ALLOW),
            answer(libc::SECCOMP_RET_KILL_PROCESS),
        ]);
    }
    for (index, number) in allowed.iter().enumerate() {
        // Jumps over the other comparisons and the kill.
        let distance = allowed.len() - index;
        program.push(jump(libc::BPF_JEQ, *number as u32, distance as u8, 0));
    }
    program.push(answer(libc::SECCOMP_RET_KILL_PROCESS));
    program.push(answer(libc::SECCOMP_RET_ALLOW));
    program
}

fn instruction(code: u32, value: u32, yes: u8, no: u8) -> libc::sock_filter {
    libc::sock_filter {
        code: code as u16,
        jt: yes,
        jf: no,
        k: value,
    }
}

fn failed(what: &str) -> LayerError {
    LayerError::Io {
        what: what.into(),
        source: io::Error::last_os_error(),
    }
}

#[cfg(test)]
mod tests {
    use std::ffi::CString;
    use std::path::PathBuf;

    use super::*;

    /// What became of a child that confined itself and then did `act`: `Ok` with its exit status, or `Err` with the signal that ended it.
    fn confined(
        outputs: &[&Path],
        act: impl FnOnce() -> libc::c_int,
    ) -> std::result::Result<i32, i32> {
        // SAFETY: the child touches nothing that another thread may hold, and leaves by _exit.
        let child = unsafe { libc::fork() };
        assert!(child >= 0);
        if child == 0 {
            let status = match confine(&Limits::default(), Scope::OpenFiles, outputs) {
                Ok(()) => act(),
                Err(_) => 99,
            };
            // SAFETY: ends the process.
            unsafe { libc::_exit(status) };
        }
        let mut status = 0;
        // SAFETY: `status` is valid for the kernel to write to.
        assert_eq!(unsafe { libc::waitpid(child, &mut status, 0) }, child);
        if libc::WIFSIGNALED(status) {
            return Err(libc::WTERMSIG(status));
        }
        Ok(libc::WEXITSTATUS(status))
    }

    fn call(number: libc::c_long, arguments: [libc::c_long; 6]) -> libc::c_int {
        let [a, b, c, d, e, f] = arguments;
        // SAFETY: in a child that may do what it likes; pointers are valid or null.
        unsafe { libc::syscall(number, a, b, c, d, e, f) };
        0
    }

    #[test]
    fn what_opens_starts_or_reaches_anything_ends_the_process() {
        let path = CString::new("/etc/passwd").unwrap();
        let path = path.as_ptr() as libc::c_long;
        let executable = libc::c_long::from(libc::PROT_READ | libc::PROT_EXEC);
        let anonymous = libc::c_long::from(libc::MAP_PRIVATE | libc::MAP_ANONYMOUS);
        let forbidden = [
            (libc::SYS_openat, [libc::AT_FDCWD.into(), path, 0, 0, 0, 0]),
            (libc::SYS_openat2, [libc::AT_FDCWD.into(), path, 0, 0, 0, 0]),
            (libc::SYS_execve, [path, 0, 0, 0, 0, 0]),
            (libc::SYS_execveat, [0, path, 0, 0, 0, 0]),
            (libc::SYS_clone, [0; 6]),
            (libc::SYS_clone3, [0; 6]),
            (libc::SYS_socket, [2, 1, 0, 0, 0, 0]),
            (libc::SYS_connect, [0; 6]),
            (libc::SYS_ptrace, [0; 6]),
            (libc::SYS_kill, [1, 0, 0, 0, 0, 0]),
            (libc::SYS_process_vm_writev, [0; 6]),
            (libc::SYS_memfd_create, [path, 0, 0, 0, 0, 0]),
            (libc::SYS_io_uring_setup, [0; 6]),
            (libc::SYS_bpf, [0; 6]),
            (libc::SYS_userfaultfd, [0; 6]),
            (libc::SYS_linkat, [0, path, 0, path, 0, 0]),
            (libc::SYS_ftruncate, [0; 6]),
            (libc::SYS_fchmod, [0; 6]),
            (libc::SYS_prlimit64, [0; 6]),
            (libc::SYS_mprotect, [0, 4096, executable, 0, 0, 0]),
            (libc::SYS_mmap, [0, 4096, executable, anonymous, -1, 0]),
        ];
        for (number, arguments) in forbidden {
            let end = confined(&[], || call(number, arguments));
            assert_eq!(end, Err(libc::SIGSYS), "system call {number}");
        }
    }

    #[test]
    fn what_a_conversion_needs_goes_on() {
        let writable = libc::c_long::from(libc::PROT_READ | libc::PROT_WRITE);
        let anonymous = libc::c_long::from(libc::MAP_PRIVATE | libc::MAP_ANONYMOUS);
        let end = confined(&[], || {
            // SAFETY: an anonymous mapping touches nothing else.
            let mapped =
                unsafe { libc::syscall(libc::SYS_mmap, 0, 1 << 20, writable, anonymous, -1, 0) };
            i32::from(mapped == -1)
        });
        assert_eq!(end, Ok(0));
    }

    #[test]
    fn memory_ends_at_the_limit() {
        let end = confined(&[], || {
            let size = (Limits::default().meta_bytes * 4 + BASE_MEMORY) as usize;
            // SAFETY: an anonymous mapping touches nothing else.
            let mapped = unsafe {
                libc::mmap(
                    std::ptr::null_mut(),
                    size,
                    libc::PROT_READ,
                    libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE,
                    -1,
                    0,
                )
            };
            i32::from(mapped != libc::MAP_FAILED)
        });
        assert_eq!(end, Ok(0));
    }

    #[test]
    fn only_its_own_directory_can_be_tidied() {
        let base = PathBuf::from(format!("/tmp/dsec-confine-{}", std::process::id()));
        let (own, foreign) = (base.join("own"), base.join("foreign"));
        for directory in [&own, &foreign] {
            std::fs::create_dir_all(directory).unwrap();
            std::fs::write(directory.join("file"), b"x").unwrap();
        }
        let remove = |path: &Path| {
            let path = CString::new(path.as_os_str().as_encoded_bytes()).unwrap();
            // SAFETY: `path` is a string that outlives the call.
            confined(&[&own], || unsafe { libc::unlink(path.as_ptr()) } & 1)
        };
        let supported = {
            // SAFETY: asks for the version only.
            unsafe { libc::syscall(libc::SYS_landlock_create_ruleset, 0, 0, 1) > 0 }
        };
        assert_eq!(remove(&foreign.join("file")), Ok(i32::from(supported)));
        assert_eq!(foreign.join("file").exists(), supported);
        assert_eq!(remove(&own.join("file")), Ok(0));
        std::fs::remove_dir_all(base).unwrap();
    }
}
