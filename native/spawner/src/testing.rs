//! What several modules' tests share.

use std::ops::Deref;
use std::path::{Path, PathBuf};

/// A directory of a test's own, removed at its end.
pub struct Directory(PathBuf);

impl Directory {
    /// `name` is unique among the tests of this crate.
    pub fn make(name: &str) -> Self {
        let path = std::env::temp_dir().join(format!("dsec-test-{name}-{}", std::process::id()));
        std::fs::create_dir_all(&path).unwrap();
        Directory(path)
    }
}

impl Deref for Directory {
    type Target = Path;

    fn deref(&self) -> &Path {
        &self.0
    }
}

impl Drop for Directory {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}
