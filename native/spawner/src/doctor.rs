//! What this kernel can do, found by trying where trying is cheap and changes nothing.
//!
//! Open files, pids and disk space are not here: the service looks at those itself, as its own limits count.

pub mod filesystems;
mod finding;
mod groups;
mod machine;
mod processes;

use std::ffi::CStr;
use std::fs;

use crate::options::Options;
use finding::{Feature, Finding, State};

const KERNEL: Feature = Feature {
    name: "kernel",
    cost: "what makes creating sandboxes fast came with 6.15; older ways are taken where it lacks",
    todo: "a newer kernel",
};
/// The newest of what the container path uses: overlay layers that are attached nowhere.
const KERNEL_WANTED: (u32, u32) = (6, 15);

/// Prints the findings as JSON. Returns the exit status: 0, whatever is lacking.
pub fn run(options: &Options) -> Result<i32, String> {
    print!("{}", finding::to_json(&findings(options)));
    Ok(0)
}

/// Each feature with "yes", or with what its lack costs: the short form that `hello` gives.
pub fn features(options: &Options) -> Vec<(String, String)> {
    let found = |finding: Finding| {
        let text = match finding.state {
            State::Ok => "yes".to_owned(),
            _ => finding.cost.to_owned(),
        };
        (finding.feature.to_owned(), text)
    };
    findings(options).into_iter().map(found).collect()
}

fn findings(options: &Options) -> Vec<Finding> {
    let release = kernel_release();
    let version = version(&release);
    let trees = groups::Trees::mounted();
    let mut all = vec![kernel(&release, version)];
    all.extend(filesystems::findings(&options.state_dir, version));
    all.extend(processes::findings(trees.v2.as_deref()));
    all.extend(groups::findings(&trees));
    all.extend(machine::findings());
    all
}

/// Only degraded where it is old: each feature is tried, and distributions carry some to older kernels.
fn kernel(release: &str, version: (u32, u32)) -> Finding {
    if version >= KERNEL_WANTED {
        KERNEL.found(release)
    } else {
        KERNEL.lacking(State::Degraded, release)
    }
}

fn kernel_release() -> String {
    // SAFETY: all-zero is a valid utsname, which the call fills with NUL-terminated strings.
    unsafe {
        let mut name: libc::utsname = std::mem::zeroed();
        libc::uname(&mut name);
        CStr::from_ptr(name.release.as_ptr())
            .to_string_lossy()
            .into_owned()
    }
}

/// Major and minor number of a release such as `6.12.3-amd64`.
fn version(release: &str) -> (u32, u32) {
    let mut numbers = release
        .split(|character: char| !character.is_ascii_digit())
        .map(|number| number.parse().unwrap_or(0));
    (numbers.next().unwrap_or(0), numbers.next().unwrap_or(0))
}

/// A small file of the kernel's, trimmed; None if it isn't there.
fn text(path: &str) -> Option<String> {
    fs::read_to_string(path)
        .ok()
        .map(|content| content.trim().to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn releases_have_two_numbers_that_count() {
        assert_eq!(version("6.18.44-amd64"), (6, 18));
        assert_eq!(version("6.1-rc3"), (6, 1));
        assert_eq!(version("odd"), (0, 0));
        assert!(version("6.9.0") < KERNEL_WANTED);
    }
}
