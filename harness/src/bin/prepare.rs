//! Fetches and makes everything that a guest needs, so that a later run needs no network.
#![allow(clippy::unwrap_used, clippy::expect_used)] // Tests use it: a panic fails them.
#![allow(clippy::indexing_slicing, clippy::panic)]

use harness::image::Image;
use harness::progress::say;
use harness::qemu::Qemu;
use harness::s390x::Mainframe;

fn main() -> anyhow::Result<()> {
    let cache = harness::Cache::open()?;
    let image = Image::get(&cache)?;
    let qemu = Qemu::find(&cache)?;
    let accel = qemu.accel(&cache)?;
    say(format!("kernel: {}", image.kernel.display()));
    say(format!("qemu: {}, {accel:?}", qemu.version));
    match Mainframe::fetch(&cache) {
        Ok(mainframe) => say(format!("s390x: {}", mainframe.version())),
        // Only the tests of AP queues need it; they say that they are skipped.
        Err(e) => say(format!("s390x: not here: {e:#}")),
    }
    Ok(())
}
