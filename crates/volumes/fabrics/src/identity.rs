//! Identity of this host towards a subsystem: its NQN and host identifier.

use nvme::identify::Nqn;
use std::fs;
use std::sync::OnceLock;

/// NQN and Host Identifier of a host ("NVMe Base 2.1", 4.7 and 5.1.25.1.28).
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct HostIdentity {
    /// NQN of the host.
    pub nqn: String,
    /// Host Identifier, in the byte order of the Connect command.
    pub id: [u8; 16],
}

/// File in which nvme-cli stores the host's NQN.
const HOST_NQN: &str = "/etc/nvme/hostnqn";
/// File in which nvme-cli stores the host's UUID.
const HOST_ID: &str = "/etc/nvme/hostid";
/// File with the machine ID of the system.
const MACHINE_ID: &str = "/etc/machine-id";
/// File with the host name, used on a host without a machine ID.
const HOST_NAME: &str = "/proc/sys/kernel/hostname";

/// Prefix of an NQN that consists of a UUID.
const BY_UUID: &str = "nqn.2014-08.org.nvmexpress:uuid:";

impl HostIdentity {
    /// Creates an identity with the NQN `nqn`. The host identifier is that of this host if the NQN
    /// is, otherwise derived from the name.
    ///
    /// # Errors
    /// A message when `nqn` is not a valid NQN.
    pub fn named(nqn: &str) -> Result<Self, &'static str> {
        if Nqn::new(nqn).is_none() || !nqn.starts_with("nqn.") {
            return Err("an NQN begins with nqn. and has at most 223 bytes");
        }
        let of_host = local();
        let id = match nqn.strip_prefix(BY_UUID).and_then(uuid) {
            _ if nqn == of_host.nqn => of_host.id,
            Some(id) => id,
            None => hashed(nqn.as_bytes()),
        };
        let nqn = nqn.into();
        Ok(Self { nqn, id })
    }
}

/// Returns this host's identity: that of nvme-cli, or otherwise one derived from the machine ID.
/// Files are read in the first call only, so that later calls succeed in a sandbox.
pub fn local() -> &'static HostIdentity {
    static LOCAL: OnceLock<HostIdentity> = OnceLock::new();
    LOCAL.get_or_init(|| {
        let read = |path: &str| fs::read_to_string(path).ok();
        let machine = read(MACHINE_ID).or_else(|| read(HOST_NAME));
        identity(read(HOST_NQN), read(HOST_ID), machine)
    })
}

fn identity(nqn: Option<String>, id: Option<String>, machine: Option<String>) -> HostIdentity {
    let machine = machine.unwrap_or_default();
    let made = hashed(machine.trim().as_bytes());
    let nqn = nqn.map(|text| text.trim().to_owned());
    let nqn = nqn.filter(|nqn| nqn.starts_with("nqn.") && Nqn::new(nqn).is_some());
    let id = id.and_then(|text| uuid(text.trim()));
    let of_name = nqn
        .as_deref()
        .and_then(|nqn| uuid(nqn.strip_prefix(BY_UUID)?));
    let id = id.or(of_name).unwrap_or(made);
    let nqn = nqn.unwrap_or_else(|| format!("{BY_UUID}{}", hyphenated(&made)));
    HostIdentity { nqn, id }
}

/// Returns the bytes of a UUID in the order of its digits; `None` if the text is invalid.
fn uuid(text: &str) -> Option<[u8; 16]> {
    let digits = text.bytes().filter(|byte| *byte != b'-');
    let mut id = [0; 16];
    let mut count = 0;
    for digit in digits {
        let value = char::from(digit).to_digit(16)? as u8;
        let byte = id.get_mut(count / 2)?;
        *byte = *byte << 4 | value;
        count += 1;
    }
    (count == 32 && id != [0; 16]).then_some(id)
}

fn hyphenated(id: &[u8; 16]) -> String {
    let hex = |bytes: &[u8]| {
        bytes
            .iter()
            .map(|byte| format!("{byte:02x}"))
            .collect::<String>()
    };
    let digits = hex(id);
    let mut rest = digits.as_str();
    let mut groups = Vec::new();
    for len in [8, 4, 4, 4, 12] {
        let (group, others) = rest.split_at_checked(len).unwrap_or((rest, ""));
        groups.push(group);
        rest = others;
    }
    groups.join("-")
}

/// Derives a UUID from bytes with FNV-1a. Equal bytes give equal UUIDs (custom version 8 of RFC
/// 9562).
fn hashed(bytes: &[u8]) -> [u8; 16] {
    let mut hash = 0x6c62_272e_07bb_0142_62b8_2175_6295_c58d_u128;
    for byte in b"vnvme host ".iter().chain(bytes) {
        hash = (hash ^ u128::from(*byte)).wrapping_mul(0x0100_0000_0000_0000_0000_013b);
    }
    let version = 0x8u128 << 76;
    let variant = 0x8u128 << 60;
    let kept = hash & !(0xf << 76) & !(0xc << 60);
    (kept | version | variant).to_be_bytes()
}

#[cfg(test)]
mod tests {
    use super::*;

    const UUID: &str = "00112233-4455-6677-8899-aabbccddeeff";

    #[test]
    fn identity_uses_nvme_cli_names_or_generates() {
        let some = |text: &str| Some(text.to_owned());
        let bytes = uuid(UUID).unwrap();
        assert_eq!(bytes[..3], [0, 0x11, 0x22]);
        assert_eq!(hyphenated(&bytes), UUID);
        let nqn = format!("{BY_UUID}{UUID}");
        let found = identity(some(&format!("{nqn}\n")), None, some("m"));
        assert_eq!((found.nqn.as_str(), found.id), (nqn.as_str(), bytes));
        let found = identity(some("nqn.x:host"), some(&format!(" {UUID}\n")), None);
        assert_eq!((found.nqn.as_str(), found.id), ("nqn.x:host", bytes));
        let (one, same) = (
            identity(None, None, some("1\n")),
            identity(None, None, some("1")),
        );
        let other = identity(some("bad"), some("bad"), some("2"));
        assert_eq!(one, same);
        assert_ne!(one.id, other.id);
        assert_eq!(one.nqn, format!("{BY_UUID}{}", hyphenated(&one.id)));
        assert_eq!((one.id[6] >> 4, one.id[8] >> 6), (8, 2));
    }

    #[test]
    fn malformed_uuid_is_refused() {
        for text in [
            "",
            "0",
            "00112233445566778899aabbccddeef",
            "0011223344556677889900aabbccddeeff0",
            "g0112233445566778899aabbccddeeff",
            "00000000-0000-0000-0000-000000000000",
        ] {
            assert_eq!(uuid(text), None, "{text}");
        }
        assert!(HostIdentity::named("host").is_err());
        let named = HostIdentity::named(&format!("{BY_UUID}{UUID}")).unwrap();
        assert_eq!(named.id, uuid(UUID).unwrap());
        assert_ne!(
            HostIdentity::named("nqn.a").unwrap().id,
            HostIdentity::named("nqn.b").unwrap().id
        );
    }
}
