//! Kinds of volumes that this program knows, by their schemes; crate `daemon` opens them.

use anyhow::{Result, ensure};
use volume::{Extras, Registry, Scheme};

/// Before the URL of a volume: that volume behind a controller in the thread that opens it.
pub const CONTROLLER: Scheme = Scheme {
    name: "controller+",
    form: "URL",
    example: "controller+mem://1G",
    help: "that volume behind a controller on the worker that serves it, driven like a device: for \
           measurements",
    options: &[],
};

/// The volume is behind a controller in the thread that opens it: no other thread may call it.
pub fn is_within(url: &str) -> bool {
    url.starts_with(CONTROLLER.name)
}

/// Refuses encryption of a volume whose device accesses the guest's memory by itself, so that
/// nothing could encrypt the data in between.
///
/// # Errors
/// The URL has `luks=`, and names such a volume.
pub fn ensure_decryptable(url: &str) -> Result<()> {
    let schemes = [driver::NVME.name, driver::VFIO_USER.name];
    let is_device = url
        .split_once("://")
        .is_some_and(|(scheme, _)| schemes.contains(&scheme));
    let is_encrypted = url
        .rsplit_once('?')
        .is_some_and(|(_, query)| query.split('&').any(|option| option.starts_with("luks=")));
    ensure!(
        !is_encrypted || !(is_device || is_within(url)),
        "{url}: luks= is not possible for volumes on NVMe devices that vnvme drives itself; give the \
         device to the kernel and serve its block device"
    );
    Ok(())
}

/// Returns the names of all options that a volume's URL may have, whatever the kind of the volume.
pub fn option_names() -> impl Iterator<Item = &'static str> {
    let below = Registry::<()>::new();
    let mut options: Vec<_> = below.schemes().map(|scheme| scheme.options).collect();
    options.extend(OTHERS.iter().map(|scheme| scheme.options));
    let options = options.into_iter().flatten().chain(Extras::OPTIONS);
    options.map(|option| option.name)
}

/// Schemes of the kinds of volumes beside those of crate `volume`.
const OTHERS: &[Scheme] = &[
    nbd::NBD,
    nbd::NBD_UNIX,
    #[cfg(feature = "qcow2")]
    qcow2::QCOW2,
    fabrics::NVME_TCP,
    rbd::RBD,
    driver::NVME,
    driver::VFIO_USER,
    CONTROLLER,
];
