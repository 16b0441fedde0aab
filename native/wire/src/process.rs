//! What the parts do to their own processes.

use std::io;

/// Lets this process have as many descriptors open as it may: one is held for each sandbox, or each blob.
///
/// # Errors
/// The kernel's.
pub fn raise_descriptor_limit() -> io::Result<()> {
    // SAFETY: rlimit is plain data.
    let result = unsafe {
        let mut limit: libc::rlimit = std::mem::zeroed();
        match libc::getrlimit(libc::RLIMIT_NOFILE, &mut limit) {
            0 => {
                limit.rlim_cur = limit.rlim_max;
                libc::setrlimit(libc::RLIMIT_NOFILE, &limit)
            }
            failed => failed,
        }
    };
    if result < 0 {
        return Err(io::Error::last_os_error());
    }
    Ok(())
}
