//! The seccomp filter of every sandbox: one classic BPF program, built here because libraries make chains whose length every system call (and
//! every load, when the kernel works out which calls are always allowed) pays for; this one is a binary search of about seven steps.
//!
//! What it lets through is Docker's default profile, less what research and incidents showed to be a way out: see the tables. Calls that the
//! tables don't know (newer than [`LAST_KNOWN`], or of another architecture) get ENOSYS, so programs fall back.

use libc::{c_long, sock_filter};

/// x86_64 numbers above this are newer than the tables (Linux 6.18).
const LAST_KNOWN: u32 = 468;

#[cfg(target_arch = "x86_64")]
const AUDIT_ARCH: u32 = 0xc000_003e;

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Verdict {
    Allow,
    /// EPERM by the spawner, which is told.
    Report,
    /// ENOSYS
    Unknown,
    /// `clone` without namespace flags only.
    Clone,
    /// `clone3` hides its flags behind a pointer: only chronus may use it, who proves itself by the cookie in arguments 5 and 6.
    Clone3,
    Ioctl,
    Personality,
    Socket,
    SetSocketOption,
}

/// Calls that no sandbox needs and each of which reaches into the kernel, the host or another process: mounting, modules, clocks, tracing
/// hooks, handles past the mount tree, swap, keys. Who tries one is refused, and reported.
#[rustfmt::skip]
const DENIED: &[(&str, c_long)] = &[
    ("acct", libc::SYS_acct), ("add_key", libc::SYS_add_key), ("bpf", libc::SYS_bpf), ("clock_adjtime", libc::SYS_clock_adjtime),
    ("clock_settime", libc::SYS_clock_settime), ("adjtimex", libc::SYS_adjtimex), ("delete_module", libc::SYS_delete_module),
    ("finit_module", libc::SYS_finit_module), ("init_module", libc::SYS_init_module), ("ioperm", libc::SYS_ioperm), ("iopl", libc::SYS_iopl),
    ("kcmp", libc::SYS_kcmp), ("kexec_file_load", libc::SYS_kexec_file_load), ("kexec_load", libc::SYS_kexec_load),
    ("keyctl", libc::SYS_keyctl), ("lookup_dcookie", libc::SYS_lookup_dcookie), ("mount", libc::SYS_mount),
    ("move_pages", libc::SYS_move_pages), ("migrate_pages", libc::SYS_migrate_pages), ("name_to_handle_at", libc::SYS_name_to_handle_at),
    ("nfsservctl", libc::SYS_nfsservctl), ("open_by_handle_at", libc::SYS_open_by_handle_at), ("perf_event_open", libc::SYS_perf_event_open),
    ("pivot_root", libc::SYS_pivot_root), ("quotactl", libc::SYS_quotactl), ("quotactl_fd", libc::SYS_quotactl_fd),
    ("reboot", libc::SYS_reboot), ("request_key", libc::SYS_request_key), ("setns", libc::SYS_setns),
    ("settimeofday", libc::SYS_settimeofday), ("swapon", libc::SYS_swapon), ("swapoff", libc::SYS_swapoff), ("sysfs", libc::SYS_sysfs),
    ("sysctl", libc::SYS__sysctl), ("syslog", libc::SYS_syslog), ("umount2", libc::SYS_umount2), ("unshare", libc::SYS_unshare),
    ("uselib", libc::SYS_uselib), ("userfaultfd", libc::SYS_userfaultfd), ("ustat", libc::SYS_ustat), ("vhangup", libc::SYS_vhangup),
    ("fanotify_init", libc::SYS_fanotify_init), ("fanotify_mark", libc::SYS_fanotify_mark), ("fsopen", libc::SYS_fsopen),
    ("fsconfig", libc::SYS_fsconfig), ("fsmount", libc::SYS_fsmount), ("fspick", libc::SYS_fspick), ("open_tree", libc::SYS_open_tree),
    ("move_mount", libc::SYS_move_mount), ("mount_setattr", libc::SYS_mount_setattr), ("io_uring_setup", libc::SYS_io_uring_setup),
    ("io_uring_enter", libc::SYS_io_uring_enter), ("io_uring_register", libc::SYS_io_uring_register), ("pidfd_getfd", libc::SYS_pidfd_getfd),
    ("process_madvise", libc::SYS_process_madvise), ("set_mempolicy_home_node", libc::SYS_set_mempolicy_home_node), ("create_module", 174),
    ("get_kernel_syms", 177), ("query_module", 178), ("statmount", 457), ("listmount", 458), ("open_tree_attr", 467),
];

/// ioctl requests refused by their low 32 bits. The block-mapping ones reach data that the file's own permissions protect (XFS_IOC_SWAPEXT was
/// used for that in production; EXT4_IOC_MOVE_EXT destroys a write-only donor unseen by mtime and inotify), TIOCSTI and TIOCLINUX type into
/// somebody else's terminal.
const DENIED_IOCTLS: &[u32] = &[
    0xc028_660f, // EXT4_IOC_MOVE_EXT
    0xc0c0_586d, // XFS_IOC_SWAPEXT
    0x4028_5881, // XFS_IOC_EXCHANGE_RANGE
    0x4028_5882, // XFS_IOC_START_COMMIT
    0x4048_5883, // XFS_IOC_COMMIT_RANGE
    0xc018_9436, // FIDEDUPERANGE
    0xc020_660b, // FS_IOC_FIEMAP
    0x0000_0001, // FIBMAP
    0x4008_6602, // FS_IOC_SETFLAGS
    0x4004_6602, // FS_IOC32_SETFLAGS
    0x401c_5820, // FS_IOC_FSSETXATTR
    0x0000_5412, // TIOCSTI
    0x0000_541c, // TIOCLINUX
];

/// CLONE_NEWNS, NEWCGROUP, NEWUTS, NEWIPC, NEWUSER, NEWPID, NEWNET.
const NAMESPACE_FLAGS: u32 = 0x7e02_0000;

/// `personality(2)` values that change no security property: Linux, its 32-bit forms, and no address randomization (gdb).
const PERSONALITIES: &[u32] = &[0x0, 0x8, 0x2_0000, 0x2_0008, 0x4_0000, 0xffff_ffff];

const DENIED_FAMILIES: &[u32] = &[libc::AF_VSOCK as u32, libc::AF_ALG as u32];

/// Options of SOL_SOCKET refused: each loads a program into the kernel, which has a limit for the code of all of them together. Once sandboxes had
/// taken it, no filter of a new sandbox could be loaded.
const DENIED_SOCKET_OPTIONS: &[u32] = &[
    libc::SO_ATTACH_FILTER as u32,
    libc::SO_ATTACH_BPF as u32,
    libc::SO_ATTACH_REUSEPORT_CBPF as u32,
    libc::SO_ATTACH_REUSEPORT_EBPF as u32,
];

fn verdict(number: u32) -> Verdict {
    let call = c_long::from(number);
    match call {
        _ if number > LAST_KNOWN => Verdict::Unknown,
        libc::SYS_clone => Verdict::Clone,
        libc::SYS_clone3 => Verdict::Clone3,
        libc::SYS_ioctl => Verdict::Ioctl,
        libc::SYS_personality => Verdict::Personality,
        libc::SYS_socket => Verdict::Socket,
        libc::SYS_setsockopt => Verdict::SetSocketOption,
        // There are 65,536 such events for the whole host (fs.aio-max-nr), and 16 calls take them.
        libc::SYS_io_setup => Verdict::Unknown,
        _ if DENIED.iter().any(|(_, number)| *number == call) => Verdict::Report,
        _ => Verdict::Allow,
    }
}

const LD: u16 = 0x20; // BPF_LD | BPF_W | BPF_ABS
const JEQ: u16 = 0x15;
const JGE: u16 = 0x35;
const JSET: u16 = 0x45;
const RET: u16 = 0x06;

const ALLOW: u32 = 0x7fff_0000;
const USER_NOTIF: u32 = 0x7fc0_0000;
const ERRNO: u32 = 0x0005_0000;
const NR: u32 = 0;
const ARCH: u32 = 4;

/// Offset of the low half of argument `index` in seccomp_data; the high half is 4 further (little endian).
const fn argument(index: u32) -> u32 {
    16 + 8 * index
}

fn op(code: u16, jt: u8, jf: u8, k: u32) -> sock_filter {
    sock_filter { code, jt, jf, k }
}

fn ret(value: u32) -> sock_filter {
    op(RET, 0, 0, value)
}

fn errno(number: i32) -> sock_filter {
    ret(ERRNO | number as u32)
}

/// Answers with `refusal` when the argument equals one of `values`, else allows.
fn refuse_any_of(index: u32, values: &[u32], refusal: sock_filter) -> Vec<sock_filter> {
    let mut out = vec![op(LD, 0, 0, argument(index))];
    for (place, value) in values.iter().enumerate() {
        out.push(op(JEQ, (values.len() - place) as u8, 0, *value));
    }
    out.push(ret(ALLOW));
    out.push(refusal);
    out
}

fn leaf(verdict: Verdict, cookie: [u64; 2]) -> Vec<sock_filter> {
    match verdict {
        Verdict::Allow => vec![ret(ALLOW)],
        Verdict::Report => vec![ret(USER_NOTIF)],
        Verdict::Unknown => vec![errno(libc::ENOSYS)],
        Verdict::Clone => vec![
            op(LD, 0, 0, argument(0)),
            op(JSET, 1, 0, NAMESPACE_FLAGS),
            ret(ALLOW),
            errno(libc::EPERM),
        ],
        Verdict::Clone3 => {
            let words = [
                cookie[0] as u32,
                (cookie[0] >> 32) as u32,
                cookie[1] as u32,
                (cookie[1] >> 32) as u32,
            ];
            let mut out = Vec::new();
            for (place, word) in words.iter().enumerate() {
                let offset = argument(4 + place as u32 / 2) + 4 * (place as u32 % 2);
                out.push(op(LD, 0, 0, offset));
                out.push(op(JEQ, 0, (2 * (3 - place) + 1) as u8, *word));
            }
            out.push(ret(ALLOW));
            out.push(errno(libc::ENOSYS));
            out
        }
        Verdict::Ioctl => refuse_any_of(1, DENIED_IOCTLS, ret(USER_NOTIF)),
        Verdict::Personality => {
            let mut out = vec![op(LD, 0, 0, argument(0))];
            for (place, value) in PERSONALITIES.iter().enumerate() {
                out.push(op(JEQ, (PERSONALITIES.len() - place) as u8, 0, *value));
            }
            out.push(errno(libc::EPERM));
            out.push(ret(ALLOW));
            out
        }
        Verdict::Socket => {
            // Of netlink only what tells of interfaces and routes: what waits in such a socket is counted for nobody, and by the others a
            // process sends to itself.
            let mut out = vec![
                op(LD, 0, 0, argument(0)),
                op(JEQ, 0, 4, libc::AF_NETLINK as u32),
                op(LD, 0, 0, argument(2)),
                op(JEQ, 0, 1, libc::NETLINK_ROUTE as u32),
                ret(ALLOW),
                errno(libc::EPROTONOSUPPORT),
            ];
            out.extend(refuse_any_of(0, DENIED_FAMILIES, errno(libc::EPERM)));
            out
        }
        Verdict::SetSocketOption => {
            let mut out = vec![
                op(LD, 0, 0, argument(1)),
                op(JEQ, 1, 0, libc::SOL_SOCKET as u32),
                ret(ALLOW),
            ];
            out.extend(refuse_any_of(2, DENIED_SOCKET_OPTIONS, errno(libc::EPERM)));
            out
        }
    }
}

/// The search over `runs` (first number, verdict) in ascending order.
fn search(runs: &[(u32, Verdict)], cookie: [u64; 2]) -> Vec<sock_filter> {
    if let [(_, only)] = runs {
        return leaf(*only, cookie);
    }
    let (low, high) = runs.split_at(runs.len() / 2);
    let below = search(low, cookie);
    let mut out = Vec::new();
    // A conditional jump spans at most 255 instructions; a subtree longer than that is jumped over by an unconditional one.
    if let Ok(span) = u8::try_from(below.len()) {
        out.push(op(JGE, span, 0, high[0].0));
    } else {
        const JA: u16 = 0x05;
        out.push(op(JGE, 0, 1, high[0].0));
        out.push(op(JA, 0, 0, below.len() as u32));
    }
    out.extend(below);
    out.extend(search(high, cookie));
    out
}

/// What a reported call is called.
pub fn name_of(number: i32, arguments: &[u64; 6]) -> String {
    let call = c_long::from(number);
    match DENIED.iter().find(|(_, known)| *known == call) {
        Some((name, _)) => (*name).to_owned(),
        None if call == libc::SYS_ioctl => format!("ioctl {:#010x}", arguments[1] as u32),
        None => format!("system call {number}"),
    }
}

/// The program of one sandbox. `cookie` lets its chronus use `clone3`.
pub fn program(cookie: [u64; 2]) -> Vec<sock_filter> {
    let mut runs: Vec<(u32, Verdict)> = Vec::new();
    for number in 0..=LAST_KNOWN + 1 {
        let now = verdict(number);
        if runs.last().is_none_or(|(_, last)| *last != now) {
            runs.push((number, now));
        }
    }
    let mut out = vec![
        op(LD, 0, 0, ARCH),
        op(JEQ, 1, 0, AUDIT_ARCH),
        errno(libc::ENOSYS),
        op(LD, 0, 0, NR),
    ];
    out.extend(search(&runs, cookie));
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Runs a program as the kernel would: (architecture, number, six arguments) to the action.
    fn run(program: &[sock_filter], number: u32, arguments: [u64; 6]) -> u32 {
        let word = |offset: u32| match offset {
            NR => number,
            ARCH => AUDIT_ARCH,
            _ => {
                let value = arguments[(offset as usize - 16) / 8];
                if (offset - 16) % 8 == 0 {
                    value as u32
                } else {
                    (value >> 32) as u32
                }
            }
        };
        let (mut at, mut accumulator) = (0, 0);
        loop {
            let step = program[at];
            at += 1;
            let taken = match step.code {
                LD => {
                    accumulator = word(step.k);
                    continue;
                }
                RET => return step.k,
                0x05 => {
                    at += step.k as usize;
                    continue;
                }
                JEQ => accumulator == step.k,
                JGE => accumulator >= step.k,
                JSET => accumulator & step.k != 0,
                code => panic!("unknown instruction {code:#x}"),
            };
            at += usize::from(if taken { step.jt } else { step.jf });
        }
    }

    const COOKIE: [u64; 2] = [0x1122_3344_5566_7788, 0x99aa_bbcc_ddee_ff00];
    const EPERM: u32 = ERRNO | 1;
    const ENOSYS: u32 = ERRNO | 38;

    #[test]
    fn every_number_gets_its_verdict() {
        let program = program(COOKIE);
        for number in 0..1000 {
            let expected = match verdict(number) {
                Verdict::Allow => ALLOW,
                Verdict::Report => USER_NOTIF,
                Verdict::Unknown => ENOSYS,
                _ => continue,
            };
            assert_eq!(run(&program, number, [0; 6]), expected, "call {number}");
        }
        assert_eq!(
            run(&program, 0x4000_0000, [0; 6]),
            ENOSYS,
            "the x32 form of read"
        );
    }

    #[test]
    fn clone3_needs_the_whole_cookie() {
        let program = program(COOKIE);
        let call = libc::SYS_clone3 as u32;
        assert_eq!(
            run(&program, call, [1, 88, 0, 0, COOKIE[0], COOKIE[1]]),
            ALLOW
        );
        for bit in 0..64 {
            assert_eq!(
                run(
                    &program,
                    call,
                    [1, 88, 0, 0, COOKIE[0] ^ 1 << bit, COOKIE[1]]
                ),
                ENOSYS
            );
            assert_eq!(
                run(
                    &program,
                    call,
                    [1, 88, 0, 0, COOKIE[0], COOKIE[1] ^ 1 << bit]
                ),
                ENOSYS
            );
        }
    }

    #[test]
    fn arguments_are_looked_at() {
        let program = program(COOKIE);
        let first = |value| [value, 0, 0, 0, 0, 0];
        assert_eq!(run(&program, libc::SYS_clone as u32, first(17)), ALLOW);
        assert_eq!(
            run(&program, libc::SYS_clone as u32, first(0x1000_0011)),
            EPERM
        );
        assert_eq!(run(&program, libc::SYS_socket as u32, first(40)), EPERM);
        assert_eq!(run(&program, libc::SYS_socket as u32, first(2)), ALLOW);
        for protocol in 0..32 {
            let netlink = [libc::AF_NETLINK as u64, 3, protocol, 0, 0, 0];
            let expected = if protocol == 0 { ALLOW } else { ERRNO | 93 };
            assert_eq!(run(&program, libc::SYS_socket as u32, netlink), expected);
        }
        for option in DENIED_SOCKET_OPTIONS {
            let [socket, tcp] = [libc::SOL_SOCKET, libc::IPPROTO_TCP]
                .map(|level| [3, level as u64, u64::from(*option), 0, 0, 0]);
            assert_eq!(run(&program, libc::SYS_setsockopt as u32, socket), EPERM);
            assert_eq!(run(&program, libc::SYS_setsockopt as u32, tcp), ALLOW);
        }
        let buffer = [3, libc::SOL_SOCKET as u64, libc::SO_RCVBUF as u64, 0, 0, 0];
        assert_eq!(run(&program, libc::SYS_setsockopt as u32, buffer), ALLOW);
        assert_eq!(
            run(&program, libc::SYS_personality as u32, first(0x4_0000)),
            ALLOW
        );
        assert_eq!(
            run(&program, libc::SYS_personality as u32, first(0x80_0000)),
            EPERM
        );
        for request in DENIED_IOCTLS {
            let high_bits_do_not_help = 0xdead_0000_0000 | u64::from(*request);
            assert_eq!(
                run(
                    &program,
                    libc::SYS_ioctl as u32,
                    [3, high_bits_do_not_help, 0, 0, 0, 0]
                ),
                USER_NOTIF
            );
        }
        assert_eq!(
            run(&program, libc::SYS_ioctl as u32, [3, 0x5401, 0, 0, 0, 0]),
            ALLOW
        );
    }

    #[test]
    fn the_search_is_short() {
        assert!(program(COOKIE).len() < 400);
    }
}
