//! What the machine, its kernel and its settings offer beyond what a container needs.

use std::fs::{self, OpenOptions};
use std::io;
use std::os::fd::AsRawFd;

use super::finding::{Feature, Finding, State};
use super::text;
use crate::sysapi::check;

const SWAP: Feature = Feature {
    name: "swap",
    cost: "nothing yet: sandboxes of this version never swap; pausing them is to need it",
    todo: "add a swap file on a fast disk (mkswap, swapon)",
};
const KVM: Feature = Feature {
    name: "KVM",
    cost: "nothing yet: this version has containers only; VMs without it are to run emulated, correct but slow",
    todo: "a machine with hardware virtualization, nested where it is a VM itself (modprobe kvm_intel or kvm_amd)",
};
const DAMON: Feature = Feature {
    name: "DAMON",
    cost: "nothing yet: this version doesn't reclaim cold memory; without it, pressure is to tell instead",
    todo: "a kernel with DAMON_SYSFS",
};
const BPF_LSM: Feature = Feature {
    name: "BPF LSM",
    cost: "nothing yet: events of this version come from seccomp and cgroups; with it they are to name files",
    todo: "a kernel with BPF_LSM, and lsm=…,bpf on its command line",
};
const APPARMOR: Feature = Feature {
    name: "AppArmor",
    cost: "one wall that a distribution may add; sandboxes of this version rely on namespaces, seccomp and capabilities",
    todo: "a kernel with SECURITY_APPARMOR, and apparmor=1 on its command line",
};
const LANDLOCK: Feature = Feature {
    name: "Landlock",
    cost: "nothing yet: a further wall around the service's unprivileged parts",
    todo: "a kernel from 5.13 with SECURITY_LANDLOCK, and lsm=landlock,… on its command line",
};
const INOTIFY: Feature = Feature {
    name: "inotify limits",
    cost: "file watchers in a sandbox (editors, development servers) run out of watches; each sandbox has limits of its own",
    todo: "sysctl -w fs.inotify.max_user_instances=512 fs.inotify.max_user_watches=524288",
};

/// What development servers commonly need (VS Code's documentation asks for the watches).
const WANTED_INSTANCES: u64 = 128;
const WANTED_WATCHES: u64 = 65_536;

pub fn findings() -> Vec<Finding> {
    vec![
        swap(),
        kvm(),
        damon(),
        bpf_lsm(),
        apparmor(),
        LANDLOCK.tried(landlock(), State::Degraded),
        inotify(
            number("/proc/sys/fs/inotify/max_user_instances"),
            number("/proc/sys/fs/inotify/max_user_watches"),
        ),
    ]
}

fn number(path: &str) -> u64 {
    text(path).and_then(|value| value.parse().ok()).unwrap_or(0)
}

fn swap() -> Finding {
    match swap_megabytes(&fs::read_to_string("/proc/swaps").unwrap_or_default()) {
        0 => SWAP.lacking(State::Degraded, "none"),
        megabytes => SWAP.found(format!("{megabytes} MB")),
    }
}

fn swap_megabytes(table: &str) -> u64 {
    let sizes = table
        .lines()
        .skip(1)
        .filter_map(|line| line.split_ascii_whitespace().nth(2)?.parse::<u64>().ok());
    sizes.sum::<u64>() / 1024
}

fn kvm() -> Finding {
    const KVM_GET_API_VERSION: libc::c_ulong = 0xae00;
    const STABLE: libc::c_int = 12;
    let version = OpenOptions::new()
        .read(true)
        .write(true)
        .open("/dev/kvm")
        .map(|device| {
            // SAFETY: the request takes no argument.
            unsafe { libc::ioctl(device.as_raw_fd(), KVM_GET_API_VERSION as _, 0) }
        });
    match version {
        Ok(STABLE) => KVM.found("/dev/kvm opens; only running a guest would prove that it works"),
        Ok(other) => KVM.lacking(
            State::Degraded,
            format!("/dev/kvm opens, but says version {other}"),
        ),
        Err(error) => KVM.tried(Err(error), State::Degraded),
    }
}

/// Only looked at: where it is in use, it is somebody else's.
fn damon() -> Finding {
    match fs::read_to_string("/sys/kernel/mm/damon/admin/kdamonds/nr_kdamonds") {
        Ok(count) if count.trim() == "0" => DAMON.found("not in use"),
        Ok(_) => DAMON.lacking(State::Degraded, "in use by something else: left alone"),
        Err(error) => DAMON.tried(Err(error), State::Degraded),
    }
}

fn bpf_lsm() -> Finding {
    match text("/sys/kernel/security/lsm") {
        Some(modules) if modules.split(',').any(|name| name == "bpf") => BPF_LSM.found(""),
        Some(modules) => BPF_LSM.lacking(State::Degraded, format!("active: {modules}")),
        None => BPF_LSM.lacking(State::Degraded, "not known: securityfs isn't mounted"),
    }
}

fn apparmor() -> Finding {
    match text("/sys/module/apparmor/parameters/enabled").as_deref() {
        Some("Y") => APPARMOR.found(""),
        Some(_) => APPARMOR.lacking(State::Degraded, "switched off"),
        None => APPARMOR.lacking(State::Degraded, ""),
    }
}

/// landlock_create_ruleset(2), asked for its version.
fn landlock() -> io::Result<String> {
    const VERSION: libc::c_ulong = 1;
    // SAFETY: with this flag the call takes no structure and makes nothing.
    let version = check(unsafe {
        libc::syscall(
            libc::SYS_landlock_create_ruleset,
            std::ptr::null::<u8>(),
            0,
            VERSION,
        )
    })?;
    Ok(format!("ABI {version}"))
}

fn inotify(instances: u64, watches: u64) -> Finding {
    let detail = format!("{instances} instances, {watches} watches a user");
    if instances >= WANTED_INSTANCES && watches >= WANTED_WATCHES {
        INOTIFY.found(detail)
    } else {
        INOTIFY.lacking(State::Degraded, detail)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn swap_areas_are_added_up() {
        let table = "Filename Type Size Used Priority\n/swap file 2097148 0 -2\n/dev/sda2 partition 1048572 0 -3\n";
        assert_eq!(swap_megabytes(table), 3071);
        assert_eq!(swap_megabytes("Filename Type Size Used Priority\n"), 0);
    }

    #[test]
    fn either_inotify_limit_may_be_too_small() {
        assert_eq!(inotify(128, 65_536).state, State::Ok);
        assert_eq!(inotify(127, 65_536).state, State::Degraded);
        assert_eq!(inotify(128, 8192).state, State::Degraded);
    }
}
