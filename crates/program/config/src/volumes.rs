//! Kinds of volumes that this program knows beside those of crate `volume`; crate `daemon` opens
//! them.

#[cfg(test)]
mod toy;

use anyhow::{Result, ensure};
use remote::{Address, RemoteKind};
use volume::{Extras, Registry, Scheme};

/// Kind of volume, by the way in which it is opened.
#[derive(Clone, Copy)]
pub enum Kind {
    /// Volume on a server, by a protocol.
    Remote(&'static dyn RemoteKind),
    /// Image in a file.
    Image(&'static [Scheme]),
    /// Namespace of an NVMe device that this process drives.
    Device(&'static [Scheme]),
    /// Volume behind a controller in the thread that opens it ([`is_within`]).
    Within(&'static [Scheme]),
}

/// All kinds of volumes beside those of crate `volume`, in the order of help texts.
pub const KINDS: &[Kind] = &[
    Kind::Remote(&nbd::Nbd),
    Kind::Image(&[QCOW2]),
    Kind::Remote(&fabrics::NvmeTcp),
    Kind::Remote(&rbd::Rbd),
    Kind::Device(&[driver::NVME, driver::VFIO_USER]),
    Kind::Within(&[CONTROLLER]),
    #[cfg(test)]
    Kind::Remote(&toy::Toy),
];

#[cfg(feature = "qcow2")]
pub use qcow2::QCOW2;

/// Scheme of qcow2 images, in a build that cannot open them.
#[cfg(not(feature = "qcow2"))]
pub const QCOW2: Scheme = Scheme {
    name: "qcow2",
    form: "PATH",
    example: "qcow2:///disks/vm0.qcow2",
    help: "a qcow2 image: not in this program (cargo feature \"qcow2\")",
    options: &[volume::READ_ONLY],
};

/// Before the URL of a volume: that volume behind a controller in the thread that opens it.
pub const CONTROLLER: Scheme = Scheme {
    name: "controller+",
    form: "URL",
    example: "controller+mem://1G",
    help: "that volume behind a controller on the worker that serves it, driven like a device: for \
           measurements",
    options: &[],
};

impl Kind {
    /// Returns the URL schemes of the kind.
    pub fn schemes(self) -> &'static [Scheme] {
        match self {
            Self::Remote(kind) => kind.schemes(),
            Self::Image(schemes) | Self::Device(schemes) | Self::Within(schemes) => schemes,
        }
    }

    /// Returns the kind of a volume; `None` for one of crate `volume`.
    pub fn of(url: &str) -> Option<Self> {
        let (before, _) = url.split_once("://").unwrap_or_default();
        let is_of = |scheme: &Scheme| {
            scheme.name == before || scheme.is_prefix() && url.starts_with(scheme.name)
        };
        let mut kinds = KINDS.iter().copied();
        kinds.find(|kind| kind.schemes().iter().any(is_of))
    }
}

/// Returns the protocol of a volume on a server; `None` for all other volumes.
pub fn remote(url: &str) -> Option<&'static dyn RemoteKind> {
    match Kind::of(url) {
        Some(Kind::Remote(kind)) => Some(kind),
        _ => None,
    }
}

/// Returns all protocols of volumes on servers.
pub fn remotes() -> impl Iterator<Item = &'static dyn RemoteKind> {
    KINDS.iter().filter_map(|kind| match kind {
        Kind::Remote(kind) => Some(*kind),
        _ => None,
    })
}

/// Returns the servers that a volume's URL names: for a process that has to know to whom it will
/// connect.
pub fn servers(url: &str) -> Vec<Address> {
    remote(url)
        .and_then(|kind| kind.servers(url))
        .unwrap_or_default()
}

/// The volume is behind a controller in the thread that opens it: no other thread may call it.
pub fn is_within(url: &str) -> bool {
    matches!(Kind::of(url), Some(Kind::Within(_)))
}

/// Refuses encryption of a volume whose device accesses the guest's memory by itself, so that
/// nothing could encrypt the data in between.
///
/// # Errors
/// The URL has `luks=`, and names such a volume.
pub fn ensure_decryptable(url: &str) -> Result<()> {
    let is_device = matches!(Kind::of(url), Some(Kind::Device(_) | Kind::Within(_)));
    let is_encrypted = url
        .rsplit_once('?')
        .is_some_and(|(_, query)| query.split('&').any(|option| option.starts_with("luks=")));
    ensure!(
        !is_encrypted || !is_device,
        "{url}: luks= is not possible for volumes on NVMe devices that vnvme drives itself; give the \
         device to the kernel and serve its block device"
    );
    Ok(())
}

/// Returns the names of all options that a volume's URL may have, whatever the kind of the volume.
pub fn option_names() -> impl Iterator<Item = &'static str> {
    let below = Registry::<()>::new();
    let mut options: Vec<_> = below.schemes().map(|scheme| scheme.options).collect();
    let others = KINDS.iter().flat_map(|kind| kind.schemes());
    options.extend(others.map(|scheme| scheme.options));
    let options = options.into_iter().flatten().chain(Extras::OPTIONS);
    options.map(|option| option.name)
}
