//! The program gives up what it doesn't need before it reads the first byte of a source.
//!
//! All files are open by then, but those of a directory that is its source: there it may open what it finds, to read it, and look at it. What remains: reading and writing them, removing or renaming the own outputs, memory, and exiting. A bug in
//! the parser that an archive exploits finds no way to open a file, start a program or reach a socket.

use std::io;

use crate::error::{LayerError, Result};
use crate::limits::Limits;

/// Seconds of CPU: 64 GiB take about four minutes.
const CPU_SECONDS: u64 = 3600;
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
    libc::SYS_mmap,
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
    /// Open, to read, what stands in directories that are open, and follow no link.
    Directory,
}

#[cfg(target_arch = "x86_64")]
const AUDIT_ARCH: u32 = 0xC000_003E;
#[cfg(target_arch = "aarch64")]
const AUDIT_ARCH: u32 = 0xC000_00B7;

/// Offsets in `struct seccomp_data`.
const DATA_NUMBER: u32 = 0;
const DATA_ARCH: u32 = 4;
/// The low half of the third argument.
const DATA_FLAGS: u32 = 32;

/// Limits this process's resources and system calls, for good.
///
/// # Errors
/// The kernel refuses: then nothing must be read.
pub fn confine(limits: &Limits, scope: Scope) -> Result<()> {
    limit(libc::RLIMIT_CORE, 0)?;
    limit(libc::RLIMIT_CPU, CPU_SECONDS)?;
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
    filter_system_calls(scope)
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
    // SAFETY: takes plain numbers.
    if unsafe { libc::prctl(libc::PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) } != 0 {
        return Err(failed("giving up new privileges"));
    }
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
    ];
    let mut allowed = ALLOWED.to_vec();
    if scope == Scope::Directory {
        allowed.extend(ALLOWED_FOR_DIRECTORIES);
        // Without O_NOFOLLOW, or with a flag that is for writing: killed.
        program.extend([
            jump(libc::BPF_JEQ, libc::SYS_openat as u32, 0, 5),
            load(DATA_FLAGS),
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
