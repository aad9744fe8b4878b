//! Writes and reads a disk through [`vmm_device::NvmeDevice`], as a guest's NVMe driver does.
//!
//! ```text
//! vmm-device [FILE]     a disk in this file or block device; without it, in memory
//! ```
#![forbid(unsafe_code)]

mod guest;

use guest::Guest;
use std::error::Error;
use std::sync::Arc;
use volume::{FileOptions, FileVolume, MemVolume, Volume};

fn main() -> Result<(), Box<dyn Error>> {
    let volume: Arc<dyn Volume> = match std::env::args_os().nth(1) {
        Some(path) => Arc::new(FileVolume::open(path, FileOptions::default())?),
        None => Arc::new(MemVolume::new(64 << 20)?),
    };
    let mut guest = Guest::new(volume)?;
    let data: Vec<u8> = (0..=255).cycle().take(4096).collect();
    guest.write(8, &data)?;
    guest.flush()?;
    if guest.read(8, data.len())? != data {
        return Err("the disk returned other data than was written".into());
    }
    println!("wrote and read {} bytes at block 8", data.len());
    Ok(())
}

#[cfg(test)]
mod tests;
