//! Memory file with the records of all disks (`crate::record`), which the keeper holds for the next
//! process.
//!
//! The file has two places, which are written in turn. A process that is killed while it writes one
//! of them leaves the other one whole. A process that a client has taken over may write anything
//! there: with it, it can change the identity and block size of its disks, and the check of their
//! files, but not which files are opened.

use super::session::KeeperSession;
use anyhow::{Context, Result, ensure};
use rustix::fs::{MemfdFlags, memfd_create};
use std::fs::File;
use std::os::fd::AsFd;
use std::os::unix::fs::FileExt;
use std::sync::Mutex;
use sync::Unpoisoned;

/// Name under which the keeper keeps the memory file of disk records.
const NAME: &str = "vnvme.r0";
/// Distance in bytes between the two places of the text in the memory file.
const APART: u64 = 1 << 30;
/// Maximum length in bytes of a text that is read.
const MAX_LEN: usize = 64 << 20;
/// Length in bytes of the head before a text: sequence number, text length, and checksum.
const HEAD: usize = 16;

/// Memory file with the records of disks, which the keeper holds for the next process.
#[derive(Debug)]
pub struct RecordsFile {
    file: File,
    /// Sequence number of the last text. Its lowest bit selects one of the two places.
    last: Mutex<u64>,
}

impl RecordsFile {
    /// Opens the file that an earlier process has left, with the text in it, or makes a new one.
    /// `None` without a keeper.
    pub fn open(keeper: &KeeperSession) -> Option<(Self, Option<String>)> {
        keeper.link()?;
        let (file, text) = match keeper.take(NAME) {
            Some(fd) => {
                let file = File::from(fd);
                let newest = newest(&file);
                (file, newest)
            }
            None => match new(keeper) {
                Ok(file) => (file, None),
                Err(error) => {
                    tracing::error!("records of disks will not outlive the process: {error:#}");
                    return None;
                }
            },
        };
        let last = text.as_ref().map_or(0, |(sequence, _)| *sequence);
        let last = Mutex::new(last);
        Some((Self { file, last }, text.map(|(_, text)| text)))
    }

    /// Replaces the text.
    ///
    /// # Errors
    /// The text is too long, or there is no memory.
    pub fn write(&self, text: &str) -> Result<()> {
        let mut last = self.last.lock().unpoisoned();
        let sequence = last.wrapping_add(1);
        write(&self.file, sequence, text)?;
        *last = sequence;
        Ok(())
    }
}

fn new(keeper: &KeeperSession) -> Result<File> {
    let file = File::from(memfd_create("vnvme-records", MemfdFlags::CLOEXEC)?);
    keeper.store(NAME, file.as_fd())?;
    Ok(file)
}

fn place(sequence: u64) -> u64 {
    (sequence & 1) * APART
}

fn sum(head: &[u8], text: &[u8]) -> u32 {
    let mut hasher = crc32fast::Hasher::new();
    hasher.update(head);
    hasher.update(text);
    hasher.finalize()
}

fn write(file: &File, sequence: u64, text: &str) -> Result<()> {
    let text = text.as_bytes();
    ensure!(text.len() <= MAX_LEN, "the records are too long");
    let len = u32::try_from(text.len())?;
    let mut head = [&sequence.to_le_bytes()[..], &len.to_le_bytes()].concat();
    let sum = sum(&head, text);
    head.extend(sum.to_le_bytes());
    file.write_all_at(&[&head, text].concat(), place(sequence))?;
    Ok(())
}

fn read(file: &File, at: u64) -> Result<(u64, String)> {
    let mut head = [0; HEAD];
    file.read_exact_at(&mut head, at)?;
    let (checked, told) = head.split_at(HEAD - 4);
    let (sequence, len) = checked.split_at(8);
    let sequence = u64::from_le_bytes(sequence.try_into()?);
    let len = u32::from_le_bytes(len.try_into()?) as usize;
    ensure!(len <= MAX_LEN && place(sequence) == at, "it is no record");
    let mut text = vec![0; len];
    file.read_exact_at(&mut text, at + HEAD as u64)?;
    ensure!(sum(checked, &text).to_le_bytes() == told, "it is not whole");
    Ok((sequence, String::from_utf8(text).context("text")?))
}

/// Returns the newest complete text in the memory file, with its sequence number.
fn newest(file: &File) -> Option<(u64, String)> {
    let places = [0, APART].into_iter();
    let whole = places.filter_map(|at| read(file, at).ok());
    whole.max_by_key(|(sequence, _)| *sequence)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn text_that_was_half_written_leaves_the_one_before() {
        let file = tempfile::tempfile().unwrap();
        assert_eq!(newest(&file), None);
        write(&file, 1, "first").unwrap();
        write(&file, 2, "second, longer").unwrap();
        assert_eq!(newest(&file), Some((2, "second, longer".to_owned())));
        write(&file, 3, "third").unwrap();
        assert_eq!(newest(&file), Some((3, "third".to_owned())));
        file.write_all_at(b"x", place(3) + HEAD as u64).unwrap();
        assert_eq!(newest(&file), Some((2, "second, longer".to_owned())));
        file.write_all_at(&[0xff; HEAD], 0).unwrap();
        assert_eq!(newest(&file), None);
    }
}
