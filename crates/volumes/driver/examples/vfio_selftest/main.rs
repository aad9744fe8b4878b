//! Tries a real NVMe controller through the kernel's VFIO, and destroys what is on the first 16 MiB
//! of its first namespace, whose first 4 MiB must hold fio's pattern `%o` in blocks of 4 KiB;
//! leaves the same in the next 4 MiB:
//!
//! ```text
//! vnvme bind 0000:44:00.0
//! cargo run --release -p vnvme-driver --example vfio_selftest -- 0000:44:00.0 [iommufd|group]
//! ```
//!
//! The project's guest tests run it against a controller that QEMU made
//! (`testing/harness/tests/guests/vfio.rs`).
#![allow(clippy::indexing_slicing)] // A test fails by a panic.

mod io;
mod outcome;
mod pattern;
mod transport;
mod worker;

use driver::DeviceTarget;
use driver::transport::Transport;
use driver::vfio::{Bdf, Interface, Vfio, VfioError, VfioOptions};
use outcome::{Outcome, ensure};
use std::process::ExitCode;
use std::sync::Arc;

fn main() -> ExitCode {
    outcome::exit("vfio_selftest", run())
}

fn run() -> Outcome {
    let words: Vec<String> = std::env::args().skip(1).collect();
    let (bdf, interface) = match words.as_slice() {
        [bdf] => (bdf, Interface::Any),
        [bdf, name] if name == "iommufd" => (bdf, Interface::Iommufd),
        [bdf, name] if name == "group" => (bdf, Interface::Group),
        _ => return Err("usage: vfio_selftest BDF [iommufd|group]".into()),
    };
    let bdf: Bdf = bdf.parse()?;
    let options = VfioOptions {
        interface,
        ..VfioOptions::default()
    };
    let vfio = Vfio::open(bdf, &options)?;
    let busy = Vfio::open(bdf, &options).err().ok_or("opened twice")?;
    ensure(matches!(busy, VfioError::Busy { .. }), busy)?;
    transport::check(&vfio)?;
    io::check(&(Arc::new(vfio) as Arc<dyn Transport>))?;
    by_url(bdf)?;
    println!("selftest passed");
    Ok(())
}

/// The way in that programs take, once everything of the first opening has been released.
fn by_url(bdf: Bdf) -> Outcome {
    let target = DeviceTarget::parse(&format!("nvme://{bdf}/1?queues=1"))?;
    let device = target.open()?;
    let mut queue = device.queue(1, target.queue)?;
    let mut block = vec![0; queue.block_size() as usize];
    queue.read(0, &mut block)?;
    ensure(block.iter().all(|byte| *byte == 0), "another block 0")?;
    println!("opened by its URL");
    Ok(())
}
