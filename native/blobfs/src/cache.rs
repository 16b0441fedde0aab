//! Cache files: one a blob, as long as the blob, with holes where chunks are missing. The holes are the only record of what is there: what an
//! earlier process left is a hint, and its content is checked before it is used.

use std::fs::{File, OpenOptions};
use std::io::{self, Write};
use std::os::fd::AsRawFd;
use std::os::unix::fs::{FileExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use sha2::{Digest, Sha256};
use wire::digest::is_digest;

use crate::table::{Kind, Table};

/// `<state>/blobfs`.
pub struct Directory {
    path: PathBuf,
    /// Held for as long as the process lives: two must not write the same files.
    _lock: File,
}

fn check(result: libc::c_int) -> io::Result<()> {
    if result < 0 {
        return Err(io::Error::last_os_error());
    }
    Ok(())
}

fn named<T>(path: &Path, result: io::Result<T>) -> io::Result<T> {
    result.map_err(|error| io::Error::new(error.kind(), format!("{}: {error}", path.display())))
}

impl Directory {
    /// Makes the directory, or takes it over once an earlier process that works in it has ended.
    pub fn open(path: PathBuf) -> io::Result<Self> {
        named(&path, std::fs::create_dir_all(&path))?;
        let lock = path.join("lock");
        let file = named(
            &lock,
            OpenOptions::new()
                .write(true)
                .create(true)
                .truncate(false)
                .mode(0o600)
                .open(&lock),
        )?;
        // SAFETY: plain integers; the descriptor is open.
        let locked = check(unsafe { libc::flock(file.as_raw_fd(), libc::LOCK_EX) });
        named(&lock, locked)?;
        Ok(Directory { path, _lock: file })
    }

    fn data(&self, blob: &str) -> PathBuf {
        self.path.join(blob)
    }

    fn table(&self, blob: &str) -> PathBuf {
        self.path.join(format!("{blob}.idx"))
    }

    /// Writes a blob's table, so that the next process can go on without being told. A digest behind it shows whether it is whole.
    pub fn save_table(&self, blob: &str, raw: &[u8]) -> io::Result<()> {
        let partial = self.path.join(format!("{blob}.part"));
        let mut file = named(&partial, File::create(&partial))?;
        file.write_all(raw)?;
        file.write_all(&Sha256::digest(raw))?;
        file.sync_all()?;
        std::fs::rename(&partial, self.table(blob))
    }

    /// The blobs whose tables are here and whole. Everything else in the directory is removed, but for what the disk doesn't give: that is said, and left to
    /// a later process.
    pub fn load_tables(&self) -> io::Result<Vec<(String, Vec<u8>)>> {
        let mut found = Vec::new();
        let mut unread = Vec::new();
        let mut others = Vec::new();
        for entry in named(&self.path, std::fs::read_dir(&self.path))?.flatten() {
            let name = entry.file_name().to_string_lossy().into_owned();
            match name.strip_suffix(".idx") {
                Some(blob) if is_digest(blob) => match read_table(&entry.path()) {
                    Ok(Some(raw)) => found.push((blob.to_owned(), raw)),
                    Ok(None) => others.push(name),
                    Err(error) => {
                        eprintln!("dsec-blobfs: {error}");
                        unread.push(blob.to_owned());
                    }
                },
                _ if name == "lock" => {}
                _ => others.push(name),
            }
        }
        for name in others {
            let is_known = found.iter().any(|(blob, _)| *blob == name) || unread.contains(&name);
            let path = self.path.join(&name);
            if !is_known && path.is_file() {
                if let Err(error) = named(&path, std::fs::remove_file(&path)) {
                    eprintln!("dsec-blobfs: {error}");
                }
            }
        }
        Ok(found)
    }

    /// Removes a blob's files; those that aren't there are fine.
    pub fn remove(&self, blob: &str) -> io::Result<()> {
        for path in [self.table(blob), self.data(blob)] {
            match std::fs::remove_file(&path) {
                Err(error) if error.kind() != io::ErrorKind::NotFound => {
                    return named(&path, Err(error))
                }
                _ => {}
            }
        }
        Ok(())
    }

    /// Opens a blob's cache file, which is made where there is none.
    pub fn open_data(&self, blob: &str, table: &Table) -> io::Result<CacheFile> {
        let path = self.data(blob);
        let file = named(
            &path,
            OpenOptions::new()
                .read(true)
                .write(true)
                .create(true)
                .truncate(false)
                .mode(0o600)
                .custom_flags(libc::O_NOFOLLOW)
                .open(&path),
        )?;
        named(&path, file.set_len(table.size))?;
        Ok(CacheFile(file))
    }
}

/// None for a table that isn't whole.
fn read_table(path: &Path) -> io::Result<Option<Vec<u8>>> {
    let mut raw = named(path, std::fs::read(path))?;
    let Some(end) = raw.len().checked_sub(32) else {
        return Ok(None);
    };
    let digest = raw.split_off(end);
    Ok((Sha256::digest(&raw)[..] == digest).then_some(raw))
}

pub struct CacheFile(File);

impl CacheFile {
    pub fn read(&self, offset: u64, buffer: &mut [u8]) -> io::Result<()> {
        self.0.read_exact_at(buffer, offset)
    }

    /// Lets the kernel begin to read this range from the disk. Without a result: it is advice.
    pub fn will_need(&self, offset: u64, length: u64) {
        // SAFETY: plain integers; the descriptor is open.
        unsafe {
            libc::posix_fadvise(
                self.0.as_raw_fd(),
                offset as libc::off_t,
                length as libc::off_t,
                libc::POSIX_FADV_WILLNEED,
            )
        };
    }

    /// Writes a chunk into space that is allocated first: a full disk shows here, and not when the kernel writes the page back.
    pub fn write(&self, offset: u64, content: &[u8]) -> io::Result<()> {
        // SAFETY: plain integers; the descriptor is open.
        check(unsafe {
            libc::fallocate(
                self.0.as_raw_fd(),
                0,
                offset as libc::off_t,
                content.len() as libc::off_t,
            )
        })?;
        self.0.write_all_at(content, offset)
    }

    /// Gives the space back; the range reads as zeros then.
    pub fn punch(&self, offset: u64, length: u64) -> io::Result<()> {
        let flags = libc::FALLOC_FL_PUNCH_HOLE | libc::FALLOC_FL_KEEP_SIZE;
        // SAFETY: plain integers; the descriptor is open.
        check(unsafe {
            libc::fallocate(
                self.0.as_raw_fd(),
                flags,
                offset as libc::off_t,
                length as libc::off_t,
            )
        })
    }

    /// Puts everything onto the disk.
    pub fn sync(&self) -> io::Result<()> {
        self.0.sync_all()
    }

    /// Whether it has a second name: then somebody relies on it as a whole blob.
    pub fn is_linked(&self) -> bool {
        self.0.metadata().is_ok_and(|meta| meta.nlink() > 1)
    }

    /// The chunks of which there is anything, each of them whole or not. Leaves holes where there is nothing, and in the place of chunks of zeros.
    pub fn survey(&self, table: &Table) -> io::Result<Vec<bool>> {
        let mut kept = vec![false; table.entries.len()];
        if self.0.metadata()?.blocks() == 0 {
            return Ok(kept);
        }
        let mut at = 0;
        while let Some(data) = self.seek(at, libc::SEEK_DATA)? {
            let hole = self.seek(data, libc::SEEK_HOLE)?.unwrap_or(table.size);
            for chunk in table.chunks_of(data, (hole - data).max(1)) {
                if let Some(kept) = kept.get_mut(chunk as usize) {
                    *kept = true;
                }
            }
            at = hole;
        }
        for (chunk, entry) in table.entries.iter().enumerate() {
            let is_zeros = entry.kind == Kind::Zeros;
            // Space that is allocated and was never written shows as a hole.
            if is_zeros || !kept[chunk] {
                let chunk = chunk as u32;
                self.punch(table.start_of(chunk), table.length_of(chunk).into())?;
            }
            kept[chunk] &= !is_zeros;
        }
        Ok(kept)
    }

    fn seek(&self, from: u64, whence: libc::c_int) -> io::Result<Option<u64>> {
        // SAFETY: plain integers; the descriptor is open, and nobody uses its position.
        let found = unsafe { libc::lseek(self.0.as_raw_fd(), from as libc::off_t, whence) };
        match u64::try_from(found) {
            Ok(offset) => Ok(Some(offset)),
            Err(_) => match io::Error::last_os_error() {
                error if error.raw_os_error() == Some(libc::ENXIO) => Ok(None),
                error => Err(error),
            },
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::table;

    fn in_directory(name: &str, work: impl FnOnce(&Directory, &Path)) {
        let path = std::env::temp_dir().join(format!("dsec-blobfs-{}-{name}", std::process::id()));
        let directory = Directory::open(path.clone()).unwrap();
        work(&directory, &path);
        std::fs::remove_dir_all(path).unwrap();
    }

    #[test]
    fn the_holes_say_what_is_there() {
        in_directory("survey", |directory, _| {
            let table = Table::parse(&table::tests::table(10 * 4096)).unwrap();
            let file = directory.open_data(&"a".repeat(64), &table).unwrap();
            assert_eq!(file.survey(&table).unwrap(), [false; 10]);
            file.write(table.start_of(3), &[1; 4096]).unwrap();
            file.write(table.start_of(9), &[1; 4096]).unwrap();
            file.sync().unwrap();
            let kept = file.survey(&table).unwrap();
            let there: Vec<usize> = (0..10).filter(|chunk| kept[*chunk]).collect();
            assert_eq!(there, [3, 9]);
            file.punch(table.start_of(3), 4096).unwrap();
            assert!(!file.survey(&table).unwrap()[3]);
        });
    }

    #[test]
    fn tables_outlive_the_process_and_broken_ones_go_with_their_data() {
        in_directory("tables", |directory, path| {
            let [good, broken, stray] = ["a", "b", "c"].map(|letter| letter.repeat(64));
            let raw = table::tests::table(4096);
            let table = Table::parse(&raw).unwrap();
            for blob in [&good, &broken] {
                directory.save_table(blob, &raw).unwrap();
            }
            for blob in [&good, &broken, &stray] {
                drop(directory.open_data(blob, &table).unwrap());
            }
            std::fs::write(path.join(format!("{broken}.idx")), &raw).unwrap();
            assert_eq!(directory.load_tables().unwrap(), [(good.clone(), raw)]);
            assert!(path.join(&good).exists());
            assert!(!path.join(&broken).exists() && !path.join(&stray).exists());
            directory.remove(&good).unwrap();
            assert_eq!(directory.load_tables().unwrap(), []);
        });
    }

    #[test]
    fn a_table_that_cant_be_read_costs_no_other_and_its_data_stays() {
        in_directory("unread", |directory, path| {
            let [good, bad] = ["a", "b"].map(|letter| letter.repeat(64));
            let raw = table::tests::table(4096);
            directory.save_table(&good, &raw).unwrap();
            let table = Table::parse(&raw).unwrap();
            drop(directory.open_data(&bad, &table).unwrap());
            // Opened like a file, read like none.
            std::fs::create_dir(path.join(format!("{bad}.idx"))).unwrap();
            assert_eq!(directory.load_tables().unwrap(), [(good, raw)]);
            assert!(path.join(&bad).exists());
        });
    }
}
