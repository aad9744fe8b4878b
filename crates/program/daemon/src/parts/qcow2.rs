//! Stands in for the crate `qcow2`.

use super::missing;
use config::volumes::QCOW2;
use volume::{JournalFolder, OpenError, VolumeKind, VolumeUrl};

/// Version of the journal of an image, as of builds with the crate.
pub const JOURNAL_VERSION: u32 = 1;

/// Leaves the journals of images to a build that can read them.
pub fn remove_obsolete_journals(_: &JournalFolder) {}

/// Returns a kind of volume that always fails to open, because this build has no qcow2.
pub fn kind<X: 'static>() -> VolumeKind<X> {
    VolumeKind::new(QCOW2, |url: &mut VolumeUrl<'_>, _| {
        let name = url.take_text().to_owned();
        Err(OpenError::Other(missing(&name, "qcow2").into()))
    })
}
