//! Default identifiers: stable, derived from the volume, so that a guest finds the same disk after
//! each restart.

use siphasher::sip128::{Hasher128, SipHasher13};
use std::hash::Hasher;
use std::os::unix::ffi::OsStrExt;
use std::path::Path;

/// 128 bits that depend on every part, the same on every machine and in every version.
fn digest(purpose: &str, parts: &[&[u8]]) -> [u8; 16] {
    let mut hasher = SipHasher13::new_with_keys(0x766e_766d_6520_6964, 1);
    hasher.write(purpose.as_bytes());
    for part in parts {
        hasher.write(&(part.len() as u64).to_le_bytes());
        hasher.write(part);
    }
    hasher.finish128().as_bytes()
}

/// Returns a serial number made from the volumes' identifiers: "VN" and 16 hexadecimal digits.
pub fn serial(volumes: &[Vec<u8>]) -> String {
    let parts: Vec<&[u8]> = volumes.iter().map(Vec::as_slice).collect();
    let digest = digest("serial", &parts);
    let hex: String = digest.iter().take(8).map(|b| format!("{b:02X}")).collect();
    format!("VN{hex}")
}

/// Returns whether a serial number is one that [`serial`] makes.
pub fn is_serial(text: &str) -> bool {
    let digits = text.strip_prefix("VN").unwrap_or_default();
    let is_digit = |byte: u8| byte.is_ascii_digit() || (b'A'..=b'F').contains(&byte);
    digits.len() == 16 && digits.bytes().all(is_digit)
}

/// Returns the keeper's name for the memory of a volume: of this namespace of this disk, and of the
/// `nth` such volume if there are several.
pub fn memory(disk: &str, nsid: u32, nth: u32) -> String {
    let numbers = u64::from(nth) << 32 | u64::from(nsid);
    let digest = digest("memory", &[disk.as_bytes(), &numbers.to_le_bytes()]);
    digest.iter().map(|b| format!("{b:02x}")).collect()
}

/// Returns the name under which the keeper keeps connections to a server; their numbers follow.
pub fn server(name: &str) -> String {
    let digest = digest("server", &[name.as_bytes()]);
    digest.iter().take(8).map(|b| format!("{b:02x}")).collect()
}

/// Returns the keeper's name for the listening socket of an export, before the inode of its file.
pub fn export(socket: &Path) -> String {
    let digest = digest("export", &[socket.as_os_str().as_bytes()]);
    digest.iter().take(8).map(|b| format!("{b:02x}")).collect()
}

/// Returns the end of the name of a record's file, for a disk with a name too long for one.
pub fn record(disk: &str) -> String {
    let digest = digest("record", &[disk.as_bytes()]);
    digest.iter().map(|b| format!("{b:02x}")).collect()
}

/// Returns an NGUID in the form of an RFC 4122 version 8 UUID, which is meant for custom
/// identifiers.
pub fn nguid(serial: &str, nsid: u32, volume: &[u8]) -> [u8; 16] {
    let mut id = digest("nguid", &[serial.as_bytes(), &nsid.to_le_bytes(), volume]);
    id[6] = id[6] & 0x0f | 0x80;
    id[8] = id[8] & 0x3f | 0x80;
    id
}

/// Returns the UUID of a namespace with this NGUID: the same bytes, where they are in the form of a
/// UUID. A namespace without an NGUID has none.
pub fn uuid(nguid: [u8; 16]) -> [u8; 16] {
    let is_uuid = (1..=8).contains(&(nguid[6] >> 4)) && nguid[8] >> 6 == 2;
    if is_uuid || nguid == [0; 16] {
        return nguid;
    }
    let mut id = digest("uuid", &[&nguid]);
    id[6] = id[6] & 0x0f | 0x80;
    id[8] = id[8] & 0x3f | 0x80;
    id
}

/// Returns an EUI-64 for a namespace, with the local bit set: it belongs to no registered company.
pub fn eui64(serial: &str, nsid: u32, volume: &[u8]) -> [u8; 8] {
    let digest = digest("eui64", &[serial.as_bytes(), &nsid.to_le_bytes(), volume]);
    let mut id = [0; 8];
    id.copy_from_slice(&digest[..8]);
    id[0] = id[0] & 0xfc | 0x02;
    id
}

/// Returns the Host Identifier for the guest of the disk with this name.
pub fn host(disk: &str) -> [u8; 16] {
    digest("host", &[disk.as_bytes()])
}

/// A subsystem NQN of the form that needs no domain of one's own: a UUID.
pub fn subnqn(serial: &str) -> String {
    let mut id = digest("subnqn", &[serial.as_bytes()]);
    id[6] = id[6] & 0x0f | 0x80;
    id[8] = id[8] & 0x3f | 0x80;
    let hex: String = id.iter().map(|b| format!("{b:02x}")).collect();
    let group = |from, to| hex.get(from..to).unwrap_or_default();
    let groups = [
        group(0, 8),
        group(8, 12),
        group(12, 16),
        group(16, 20),
        group(20, 32),
    ];
    format!("nqn.2014-08.org.nvmexpress:uuid:{}", groups.join("-"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn identity_is_stable_across_versions() {
        let volume = b"/disks/a.raw".to_vec();
        // Guests' boot configurations hold these values: a change of them is a change of the
        // guest's disk names.
        assert_eq!(serial(std::slice::from_ref(&volume)), "VND208DCFEFE48385A");
        assert_eq!(
            subnqn("vm0"),
            "nqn.2014-08.org.nvmexpress:uuid:f11bacca-a24c-8ec3-ba5f-eb5ab4f29703"
        );
        assert_eq!(
            nguid("vm0", 1, &volume),
            [
                185, 130, 29, 87, 189, 95, 133, 122, 131, 34, 107, 140, 31, 126, 17, 59
            ]
        );
        assert_eq!(
            eui64("vm0", 1, &volume),
            [142, 240, 33, 228, 94, 96, 207, 26]
        );
        assert_ne!(
            serial(&[b"ab".to_vec(), b"c".to_vec()]),
            serial(&[b"a".to_vec(), b"bc".to_vec()])
        );
        assert_ne!(nguid("s", 1, &volume), nguid("s", 2, &volume));
        assert_ne!(eui64("s", 1, &volume), eui64("t", 1, &volume));
        assert_eq!(nguid("s", 1, &volume)[6] >> 4, 8);
        assert_eq!(eui64("s", 1, &volume)[0] & 3, 2);
    }

    #[test]
    fn uuid_is_the_nguid_where_that_is_one() {
        let made = nguid("s", 1, b"a");
        assert_eq!(uuid(made), made);
        assert_eq!(uuid([0; 16]), [0; 16]);
        let other = uuid([0x11; 16]);
        assert_ne!(other, [0x11; 16]);
        assert_eq!(uuid(other), other);
    }
}
