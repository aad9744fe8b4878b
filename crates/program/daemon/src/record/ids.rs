//! Default identifiers of namespaces and disks: which part of a volume they are made from, and how
//! far they are unique.

use config::choices::IdentityRule;
use config::identity;
use hmac::{Hmac, Mac};
use namespace_pool::Nguid;
use sha2::Sha256;
use std::path::Path;
use volume::{Kind, Volume};

/// Identifiers of a namespace that a guest can see: NGUID, EUI-64 and UUID.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Ids {
    pub nguid: [u8; 16],
    pub eui64: [u8; 8],
    /// Namespace UUID; zeroes if the namespace has none.
    pub uuid: [u8; 16],
}

impl Ids {
    /// Makes the identifiers of a namespace from bytes that identify its volume.
    pub fn made(rule: IdentityRule, serial: &str, nsid: u32, source: &[u8]) -> Self {
        let nguid = identity::nguid(serial, nsid, source);
        Self {
            nguid,
            eui64: identity::eui64(serial, nsid, source),
            uuid: match rule {
                IdentityRule::Machine => identity::uuid(nguid),
                IdentityRule::Path => [0; 16],
            },
        }
    }
}

/// Application ID with which the machine's ID is hashed: programs must not show the ID itself
/// (machine-id(5)).
const APPLICATION: [u8; 16] = [
    0x8f, 0x3d, 0x52, 0x0c, 0x1a, 0x77, 0x4e, 0x0b, 0x9c, 0x65, 0x2d, 0xf1, 0xb8, 0x40, 0x93, 0xe6,
];
const MACHINE_ID: &str = "/etc/machine-id";

/// Returns this machine's ID for vnvme alone, as `sd_id128_get_machine_app_specific` makes it.
/// `None` where the machine has none, as in some containers.
pub fn machine() -> Option<[u8; 16]> {
    let text = std::fs::read_to_string(Path::new(MACHINE_ID)).ok()?;
    of_machine(&text)
}

fn of_machine(text: &str) -> Option<[u8; 16]> {
    let id: [u8; 16] = config::spec::hex("machine-id", text.trim_end()).ok()?;
    if id == [0; 16] {
        return None;
    }
    let mut mac = Hmac::<Sha256>::new_from_slice(&id).ok()?;
    mac.update(&APPLICATION);
    let sum = mac.finalize().into_bytes();
    let mut own: [u8; 16] = *sum.first_chunk()?;
    own[6] = own[6] & 0x0f | 0x40;
    own[8] = own[8] & 0x3f | 0x80;
    Some(own)
}

/// Bytes that identify a volume, from which its identifiers are made.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Source {
    /// Identifier of the volume that is equal on every host.
    Own(Vec<u8>),
    /// Path or name of the volume on this host.
    Host(Vec<u8>),
    /// Random bytes, for a volume that exists only as long as its process and those that continue
    /// it.
    Random([u8; 16]),
}

impl Source {
    /// Returns the source of identifiers for a volume; `None` stands for one that its worker opens.
    pub fn of(volume: Option<&dyn Volume>, rule: IdentityRule, machine: Option<[u8; 16]>) -> Self {
        if rule == IdentityRule::Path {
            return Self::Host(volume.map_or_else(Vec::new, Volume::id));
        }
        let Some(volume) = volume else {
            return Self::random();
        };
        if let Some(id) = volume.own_id() {
            return Self::Own([&b"own:"[..], &id].concat());
        }
        match (volume.info().kind, machine) {
            (Kind::Memory | Kind::Null, _) => Self::random(),
            (_, Some(machine)) => Self::Host([&b"machine:"[..], &machine, &volume.id()].concat()),
            (_, None) => Self::Host(volume.id()),
        }
    }

    fn random() -> Self {
        // Without random bytes, the system cannot do anything.
        Self::Random(Nguid::random().map_or([0; 16], |Nguid(id)| id))
    }

    /// Returns the bytes from which identifiers are made.
    pub fn bytes(&self) -> Vec<u8> {
        match self {
            Self::Own(bytes) | Self::Host(bytes) => bytes.clone(),
            Self::Random(id) => [&b"random:"[..], id].concat(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use volume::{Extent, Info, Io, MemVolume, OpenQueue, VolumeError, open_url};

    /// An image whose cluster has an identifier for it, at an address of this host.
    #[derive(Debug)]
    struct RemoteImage {
        address: &'static str,
        memory: MemVolume,
    }

    impl Volume for RemoteImage {
        fn info(&self) -> Info {
            Info {
                kind: Kind::File,
                ..self.memory.info()
            }
        }

        fn open(&self, io: &Io) -> Result<OpenQueue, VolumeError> {
            self.memory.open(io)
        }

        fn id(&self) -> Vec<u8> {
            self.address.as_bytes().to_vec()
        }

        fn own_id(&self) -> Option<Vec<u8>> {
            Some(b"rbd:fsid/1/id".to_vec())
        }

        fn inner(&self) -> Option<&dyn Volume> {
            None
        }

        fn extent(&self) -> Option<Extent> {
            None
        }
    }

    #[test]
    fn image_with_identifier_of_its_own_has_one_identity_on_all_machines() {
        let ids = |address, machine| {
            let memory = MemVolume::new(4096).unwrap();
            let volume = RemoteImage { address, memory };
            let source = Source::of(Some(&volume), IdentityRule::Machine, machine);
            let bytes = source.bytes();
            let serial = identity::serial(std::slice::from_ref(&bytes));
            (Ids::made(IdentityRule::Machine, &serial, 1, &bytes), serial)
        };
        let here = ids("pool/image", Some([1; 16]));
        assert_eq!(here, ids("pool/image", Some([2; 16])));
        assert_eq!(here, ids("renamed/image?conf=/other", None));
    }

    #[test]
    fn machine_id_is_hashed_and_differs_between_machines() {
        let [a, b] = [
            "3d1219c7c4c5404aaa1f6d2a48adfda4\n",
            "3d1219c7c4c5404aaa1f6d2a48adfda5",
        ]
        .map(|text| of_machine(text).unwrap());
        assert_ne!(a, b);
        assert_ne!(a[..4], [0x3d, 0x12, 0x19, 0xc7]);
        for none in ["", "uninitialized\n", &"0".repeat(32)] {
            assert_eq!(of_machine(none), None);
        }
    }

    #[test]
    fn file_on_two_machines_has_two_identities() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("a.raw");
        std::fs::write(&path, [0; 4096]).unwrap();
        let volume = open_url(path.to_str().unwrap(), volume::OpenOptions::default()).unwrap();
        let ids = |rule, machine| {
            let source = Source::of(Some(&*volume), rule, Some(machine));
            Ids::made(rule, "s", 1, &source.bytes())
        };
        let (here, there) = ([1; 16], [2; 16]);
        let machine = IdentityRule::Machine;
        assert_ne!(ids(machine, here), ids(machine, there));
        assert_eq!(ids(machine, here), ids(machine, here));
        assert_eq!(ids(machine, here).uuid, ids(machine, here).nguid);
        let path = IdentityRule::Path;
        assert_eq!(ids(path, here), ids(path, there));
        assert_eq!(ids(path, here).uuid, [0; 16]);
    }

    #[test]
    fn volumes_in_memory_have_random_identities() {
        let volume = MemVolume::new(4096).unwrap();
        let source = || Source::of(Some(&volume), IdentityRule::Machine, Some([1; 16]));
        assert_ne!(source(), source());
    }
}
