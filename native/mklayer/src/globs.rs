//! Which paths of a directory source stay out of the layer.
//!
//! Globs are matched against whole absolute paths, bytewise: `*` and `?` stay within a name, `**` stands for any number of directories,
//! `[…]` and `{a,b}` are sets. A glob without a leading slash matches at any depth. A directory that matches takes along all that is in it.

use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt;

use globset::{GlobBuilder, GlobSet, GlobSetBuilder};

use crate::error::{LayerError, Result};

/// Most globs of one run, and bytes of each: they are compiled to one automaton, whose size grows with both.
const GLOBS_MAX: usize = 512;
const GLOB_BYTES_MAX: usize = 1024;

pub struct Globs {
    set: GlobSet,
    count: usize,
}

impl Globs {
    /// Compiles `patterns`, whose positions are what [`Globs::first_match`] gives.
    ///
    /// # Errors
    /// One that is malformed, empty or too long, by name; too many.
    pub fn new(patterns: &[String]) -> Result<Self> {
        if patterns.len() > GLOBS_MAX {
            return Err(LayerError::Usage(format!(
                "{} globs, at most {GLOBS_MAX} are allowed",
                patterns.len()
            )));
        }
        let mut set = GlobSetBuilder::new();
        for pattern in patterns {
            let refuse = |what: String| LayerError::Usage(format!("glob {pattern:?}: {what}"));
            if pattern.len() > GLOB_BYTES_MAX {
                return Err(refuse(format!("longer than {GLOB_BYTES_MAX} bytes")));
            }
            let plain = pattern.trim_end_matches('/');
            if plain.is_empty() {
                return Err(refuse("it names nothing".into()));
            }
            let absolute = if plain.starts_with('/') {
                plain.to_owned()
            } else {
                format!("/**/{plain}")
            };
            let glob = GlobBuilder::new(&absolute)
                .literal_separator(true)
                .backslash_escape(true)
                .build()
                .map_err(|error| refuse(error.kind().to_string()))?;
            set.add(glob);
        }
        let set = set
            .build()
            .map_err(|error| LayerError::Usage(format!("the globs together: {error}")))?;
        Ok(Globs {
            set,
            count: patterns.len(),
        })
    }

    pub fn count(&self) -> usize {
        self.count
    }

    /// The first of the globs that matches `path`, which begins with a slash.
    pub fn first_match(&self, path: &[u8]) -> Option<usize> {
        if self.count == 0 {
            return None;
        }
        self.set.matches(OsStr::from_bytes(path)).into_iter().min()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn matching(pattern: &str, paths: &[&str]) -> Vec<bool> {
        let globs = Globs::new(&[pattern.to_owned()]).unwrap();
        let matches = |path: &&str| globs.first_match(path.as_bytes()).is_some();
        paths.iter().map(matches).collect()
    }

    #[test]
    fn a_star_stays_within_a_name() {
        assert_eq!(
            matching("/var/*.log", &["/var/a.log", "/var/x/a.log", "/var/.log"]),
            [true, false, true]
        );
    }

    #[test]
    fn two_stars_cross_directories() {
        let paths = ["/a/b", "/a/x/b", "/a/x/y/b", "/b", "/a/xb"];
        assert_eq!(
            matching("/a/**/b", &paths),
            [true, true, true, false, false]
        );
        assert_eq!(
            matching("/a/**", &["/a", "/a/x", "/a/x/y"]),
            [false, true, true]
        );
    }

    #[test]
    fn a_relative_glob_matches_at_any_depth() {
        let paths = ["/__pycache__", "/x/__pycache__", "/x/__pycache__/y"];
        assert_eq!(matching("__pycache__", &paths), [true, true, false]);
        assert_eq!(matching("__pycache__/", &paths), [true, true, false]);
        assert_eq!(
            matching("*.pyc", &["/a.pyc", "/x/y/a.pyc", "/x/a.py"]),
            [true, true, false]
        );
    }

    #[test]
    fn names_that_are_no_text_are_matched_bytewise() {
        let globs = Globs::new(&["/d/*".into(), "/e/?".into()]).unwrap();
        assert_eq!(globs.first_match(b"/d/\xff\xfe"), Some(0));
        assert_eq!(globs.first_match(b"/e/\xff"), Some(1));
    }

    #[test]
    fn the_first_of_several_is_named() {
        let globs = Globs::new(&["/a".into(), "b".into(), "/x/b".into()]).unwrap();
        assert_eq!(globs.first_match(b"/x/b"), Some(1));
        assert_eq!(globs.first_match(b"/a"), Some(0));
        assert_eq!(globs.first_match(b"/c"), None);
    }

    #[test]
    fn what_is_no_glob_is_refused_by_name() {
        for pattern in ["", "/", "[", "{a", &"x".repeat(2000)] {
            let error = Globs::new(&[pattern.to_owned()])
                .err()
                .map(|error| error.to_string());
            assert!(error.is_some_and(|text| text.contains("glob")), "{pattern}");
        }
    }
}
