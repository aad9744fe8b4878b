//! Image formats of other programs, detected by their first bytes. If such an image were served as
//! raw, the guest would read the format's tables and destroy them with its first write.
//!
//! The check only ever refuses. It never opens an image in the format that it finds, as programs do
//! that probe: a guest can write any header to its own raw disk, and would choose what its host
//! opens next. A raw disk with such a header (or with an image as it is) is served with
//! `format=raw`. Formats that guests make on whole disks themselves are raw disks: filesystems are
//! not looked for, and LUKS is reported only for a warning.

/// Number of bytes at the beginning of a file in which image formats are recognised.
pub(super) const HEAD: usize = 512;

/// Name of each format, and the offset and value of the bytes that identify it. For names that
/// share a value, the version decides.
const MAGICS: [(&str, usize, &[u8]); 11] = [
    ("qcow2", 0, b"QFI\xfb\0\0\0\x02"),
    ("qcow2", 0, b"QFI\xfb\0\0\0\x03"),
    ("qcow", 0, b"QFI\xfb"),
    ("QED", 0, b"QED\0"),
    ("VMDK", 0, b"KDMV"),
    ("VMDK", 0, b"COWD"),
    ("VMDK", 0, b"# Disk DescriptorFile"),
    // After a text for people: VDI_SIGNATURE, 0xbeda107f.
    ("VDI", 0x40, b"\x7f\x10\xda\xbe"),
    ("VHDX", 0, b"vhdxfile"),
    // A dynamic one; a fixed one is a raw disk with a footer.
    ("VHD", 0, b"conectix"),
    ("Parallels", 0, b"WithoutFreeSpace"),
];
/// Signature of the extended Parallels format, a variant of the last entry of the table.
const PARALLELS_EXTENDED: &[u8] = b"WithouFreSpacExt";

/// Signature of both versions of LUKS.
const LUKS: &[u8] = b"LUKS\xba\xbe";

/// Kind of a file's content that is reported before the file is served as raw.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum HeadKind {
    /// An image of this format, which cannot be served as raw.
    Image(&'static str),
    /// Encrypted bytes, which only their guest may be able to decrypt.
    Encrypted,
}

/// Returns the kind of content that these first bytes belong to.
pub(super) fn detect(head: &[u8]) -> Option<HeadKind> {
    let is = |at: usize, magic: &[u8]| head.get(at..).is_some_and(|rest| rest.starts_with(magic));
    if is(0, PARALLELS_EXTENDED) {
        return Some(HeadKind::Image("Parallels"));
    }
    if is(0, LUKS) {
        return Some(HeadKind::Encrypted);
    }
    let found = MAGICS.iter().find(|(_, at, magic)| is(*at, magic));
    found.map(|(name, ..)| HeadKind::Image(name))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn image_formats_are_detected_by_first_bytes() {
        let mut vdi = *b"<<< Oracle VM VirtualBox Disk Image >>>\n                        \x7f\x10\xda\xbe\x01\0\x01\0";
        for (head, name) in [
            (&b"QFI\xfb\0\0\0\x03 and more"[..], "qcow2"),
            (b"QFI\xfb\0\0\0\x02", "qcow2"),
            (b"QFI\xfb\0\0\0\x01", "qcow"),
            (b"QED\0\0\0\x01\0", "QED"),
            (b"KDMV\x01\0\0\0", "VMDK"),
            (b"COWD\x01\0\0\0", "VMDK"),
            (b"# Disk DescriptorFile\nversion=1", "VMDK"),
            (b"vhdxfileQ\0E\0M\0U\0", "VHDX"),
            (b"conectix\0\0\0\x02", "VHD"),
            (b"WithoutFreeSpace\x02", "Parallels"),
            (b"WithouFreSpacExt\x02", "Parallels"),
            (&vdi, "VDI"),
        ] {
            assert_eq!(detect(head), Some(HeadKind::Image(name)), "{head:?}");
        }
        let luks = detect(b"LUKS\xba\xbe\0\x02");
        assert_eq!(luks, Some(HeadKind::Encrypted));
        vdi[0x41] = 0;
        let mbr = [0; HEAD];
        for raw in [&b""[..], b"QFI", b"QED", &mbr, &vdi, b"LUKS", b"EFI PART"] {
            assert_eq!(detect(raw), None, "{raw:?}");
        }
    }
}
