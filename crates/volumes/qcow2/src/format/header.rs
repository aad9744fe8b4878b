//! The header and its extensions (sections "Header" and "Header extensions").

/// Number of bytes at the beginning of a file that contain every header. The header lies in the
/// first cluster, and this is the maximum cluster size.
pub const HEADER_ROOM: usize = 1 << 21;
/// Byte offset in the header of the disk size.
pub const OFFSET_SIZE: u64 = 24;
/// Byte offset in the header of the L1 table's number of entries and offset.
pub const OFFSET_L1: u64 = 36;
/// Byte offset in the header of the refcount table's offset and number of clusters.
pub const OFFSET_REFCOUNTS: u64 = 48;
/// Byte offset in the header of the feature fields: incompatible, compatible, autoclear.
pub const OFFSET_FEATURES: u64 = 72;
/// Place of a journal's number among the autoclear features. The format has defined the lowest bits
/// of the lower half.
const JOURNAL_SHIFT: u32 = 32;
/// Incompatible feature bit: refcounts may be wrong, but references are right.
pub const DIRTY: u64 = 1;

const CORRUPT: u64 = 1 << 1;
const EXTERNAL_DATA: u64 = 1 << 2;
const COMPRESSION: u64 = 1 << 3;
const EXTENDED_L2: u64 = 1 << 4;
/// Autoclear feature bit: persistent bitmaps are valid.
const BITMAPS: u64 = 1;

const MAGIC: &[u8; 4] = b"QFI\xfb";
const EXTENSION_END: u32 = 0;
const EXTENSION_BACKING_FORMAT: u32 = 0xe279_2aca;
const EXTENSION_BITMAPS: u32 = 0x2385_2875;

/// Maximum length in bytes of a backing file's name.
const MAX_NAME_LEN: usize = 1023;
/// Maximum size of an L1 table in bytes, equal to QEMU's (`QCOW_MAX_L1_SIZE`).
const LARGEST_L1: u64 = 32 << 20;
/// Maximum size of a refcount table in bytes, equal to QEMU's (`QCOW_MAX_REFTABLE_SIZE`).
const LARGEST_REFTABLE: u64 = 8 << 20;
/// Number of bits of an offset within an image file.
const OFFSET_BITS: u32 = 56;

/// Reason why an image cannot be served. Error messages append it to the image's name.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[allow(missing_docs)] // Each variant's message says what it is.
pub enum FormatError {
    #[error("is not a qcow2 image")]
    Magic,
    #[error("ends within its header")]
    Short,
    #[error("is an image of unsupported version {0}; convert it with: qemu-img convert -O qcow2")]
    Version(u32),
    #[error("has clusters of 2^{0} bytes; from 512 bytes to 2 MiB are possible")]
    ClusterBits(u32),
    #[error("is encrypted, which is not supported; convert it with: qemu-img convert")]
    Encrypted,
    #[error("needs a feature that is not supported: {0}")]
    Feature(&'static str),
    #[error("needs the unknown feature of bit {0}")]
    UnknownFeature(u32),
    #[error("is compressed in a way that is not supported ({}); convert it with: qemu-img convert -O qcow2 -o compression_type=zlib", compression(*.0))]
    Compression(u8),
    #[error("has refcounts of 2^{0} bits; up to 64 bits are possible")]
    RefcountOrder(u32),
    #[error("has a header of invalid length {0}")]
    HeaderLength(u32),
    #[error("has a header extension that does not end within the first cluster")]
    Extension,
    #[error(
        "names its backing file in {len} bytes from byte {offset} on, which is not in the first cluster or longer than 1023 bytes"
    )]
    BackingName { offset: u64, len: u32 },
    #[error("names its backing file in bytes that are not UTF-8")]
    BackingText,
    #[error("has an impossible size of {0} bytes")]
    Size(u64),
    #[error("has an L1 table of {entries} entries instead of the {needed} that its size needs")]
    L1Short { entries: u32, needed: u64 },
    #[error("has an L1 table of {0} entries, which is more than 32 MiB")]
    L1Long(u32),
    #[error(
        "has a refcount table of {0} clusters, which is more than 8 MiB, or none; serve it with read-only=on to rescue its data"
    )]
    Reftable(u32),
    #[error("has its L1 table at byte {0}, not at the start of a cluster")]
    L1Place(u64),
    #[error(
        "has its refcount table at byte {0}, not at the start of a cluster; serve it with read-only=on to rescue its data"
    )]
    ReftablePlace(u64),
    #[error(
        "is marked as corrupt: repair it with qemu-img check -r all, or serve it with read-only=on"
    )]
    Corrupt,
    #[error(
        "has {0} internal snapshots, with which it can only be served with read-only=on; delete them with qemu-img snapshot -d"
    )]
    Snapshots(u32),
    #[error(
        "has persistent bitmaps, which writing would make wrong; remove them with qemu-img bitmap --remove, or serve it with read-only=on"
    )]
    Bitmaps,
    #[error(
        "is an image of version 2, which can only be served with read-only=on; change it with: qemu-img amend -o compat=1.1"
    )]
    Old,
    #[error("has refcounts of {} bits, with which it can only be served with read-only=on; convert it with: qemu-img convert -O qcow2", 1 << .0)]
    NarrowRefcounts(u32),
}

fn compression(kind: u8) -> String {
    match kind {
        1 => "zstd".to_owned(),
        other => format!("type {other}"),
    }
}

/// Parameters of a qcow2 image that determine its layout.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Geometry {
    /// Version of the qcow2 format, 2 or 3.
    pub version: u32,
    /// Cluster size as a power of two in bytes, 9 to 21.
    pub cluster_bits: u32,
    /// Width of a refcount as a power of two in bits, 0 to 6.
    pub refcount_order: u32,
}

impl Geometry {
    /// Returns the size of a cluster in bytes.
    #[inline]
    pub const fn cluster_size(&self) -> u64 {
        1 << self.cluster_bits
    }

    /// Returns the logarithm of the number of entries in an L2 table, which is one cluster.
    #[inline]
    pub const fn table_bits(&self) -> u32 {
        self.cluster_bits - 3
    }

    /// Returns the logarithm of the number of refcounts in a refcount block, which is one cluster.
    pub const fn refcount_bits(&self) -> u32 {
        self.cluster_bits + 3 - self.refcount_order
    }

    /// Returns the number of clusters that `bytes` bytes occupy, rounded up.
    pub const fn clusters(&self, bytes: u64) -> u64 {
        bytes.div_ceil(self.cluster_size())
    }

    /// Returns the number of L1 entries that a disk of `bytes` bytes needs.
    pub const fn l1_entries(&self, bytes: u64) -> u64 {
        bytes.div_ceil(1 << (self.cluster_bits + self.table_bits()))
    }
}

/// Header of a qcow2 image.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Header {
    /// Version, cluster size and refcount width of the image.
    pub geometry: Geometry,
    /// Size of the virtual disk in bytes.
    pub size: u64,
    /// Number of entries in the L1 table.
    pub l1_entries: u32,
    /// Byte offset of the L1 table in the file.
    pub l1_offset: u64,
    /// Byte offset of the refcount table in the file.
    pub reftable_offset: u64,
    /// Number of clusters in the refcount table.
    pub reftable_clusters: u32,
    /// Number of internal snapshots in the image.
    pub snapshots: u32,
    /// Incompatible features: a reader that does not know one of them must refuse the image.
    pub incompatible: u64,
    /// Compatible features, which a program may ignore.
    pub compatible: u64,
    /// Autoclear features: a writer must clear those that it does not know.
    pub autoclear: u64,
    /// Name of the backing file, as stored in the image.
    pub backing: Option<String>,
    /// Format of the backing file, as stored in the image.
    pub backing_format: Option<String>,
    has_bitmaps: bool,
}

/// Reader of the big-endian fields in a header's bytes.
struct Fields<'a>(&'a [u8]);

impl Fields<'_> {
    fn bytes<const N: usize>(&self, at: usize) -> Result<[u8; N], FormatError> {
        let bytes = self.0.get(at..).and_then(|rest| rest.first_chunk::<N>());
        bytes.copied().ok_or(FormatError::Short)
    }

    fn u32(&self, at: usize) -> Result<u32, FormatError> {
        Ok(u32::from_be_bytes(self.bytes(at)?))
    }

    fn u64(&self, at: usize) -> Result<u64, FormatError> {
        Ok(u64::from_be_bytes(self.bytes(at)?))
    }
}

impl Header {
    /// Parses the header of an image. `bytes`: the beginning of the image, either all of it or
    /// [`HEADER_ROOM`] bytes.
    ///
    /// # Errors
    /// [`FormatError`] when the header is invalid or an unsupported feature is used.
    pub fn parse(bytes: &[u8]) -> Result<Self, FormatError> {
        let fields = Fields(bytes);
        if fields.bytes(0)? != *MAGIC {
            return Err(FormatError::Magic);
        }
        let version = fields.u32(4)?;
        if !matches!(version, 2 | 3) {
            return Err(FormatError::Version(version));
        }
        let cluster_bits = fields.u32(20)?;
        if !(9..=21).contains(&cluster_bits) {
            return Err(FormatError::ClusterBits(cluster_bits));
        }
        if fields.u32(32)? != 0 {
            return Err(FormatError::Encrypted);
        }
        let (incompatible, compatible, autoclear, refcount_order, length) = match version {
            2 => (0, 0, 0, 4, 72),
            _ => (
                fields.u64(72)?,
                fields.u64(80)?,
                fields.u64(88)?,
                fields.u32(96)?,
                fields.u32(100)?,
            ),
        };
        let least = if version == 2 { 72 } else { 104 };
        let cluster = 1usize << cluster_bits;
        if length < least || length as usize > cluster || !length.is_multiple_of(8) {
            return Err(FormatError::HeaderLength(length));
        }
        check_features(incompatible)?;
        // Additional field: how clusters are compressed.
        let kind = if length > 104 {
            u8::from_be_bytes(fields.bytes(104)?)
        } else {
            0
        };
        if kind != 0 {
            return Err(FormatError::Compression(kind));
        }
        if incompatible & COMPRESSION != 0 {
            return Err(FormatError::UnknownFeature(3));
        }
        if refcount_order > 6 {
            return Err(FormatError::RefcountOrder(refcount_order));
        }
        let geometry = Geometry {
            version,
            cluster_bits,
            refcount_order,
        };
        let first = bytes.get(..cluster).unwrap_or(bytes);
        let name_offset = fields.u64(8)?;
        let backing = backing(first, name_offset, fields.u32(16)?)?;
        // Extensions lie between the header and the name of the backing file.
        let end = usize::try_from(name_offset).ok().filter(|end| *end > 0);
        let area = end.and_then(|end| first.get(..end)).unwrap_or(first);
        let extensions = extensions(area, length as usize)?;
        let header = Self {
            geometry,
            size: fields.u64(24)?,
            l1_entries: fields.u32(36)?,
            l1_offset: fields.u64(40)?,
            reftable_offset: fields.u64(48)?,
            reftable_clusters: fields.u32(56)?,
            snapshots: fields.u32(60)?,
            incompatible,
            compatible,
            autoclear,
            backing,
            backing_format: extensions.backing_format,
            has_bitmaps: extensions.bitmaps || autoclear & BITMAPS != 0,
        };
        header.check_sizes()?;
        Ok(header)
    }

    /// Returns the number of the journal that continues the image; 0 if there is none, or if
    /// another program has written the image since.
    pub(crate) fn journal(&self) -> u32 {
        (self.autoclear >> JOURNAL_SHIFT) as u32
    }

    /// Returns the autoclear features of an image with this journal.
    pub(crate) fn autoclear_of(journal: u32) -> u64 {
        u64::from(journal) << JOURNAL_SHIFT
    }

    fn check_sizes(&self) -> Result<(), FormatError> {
        let geometry = &self.geometry;
        if self.size == 0 || i64::try_from(self.size).is_err() {
            return Err(FormatError::Size(self.size));
        }
        let entries = self.l1_entries;
        if u64::from(entries) * 8 > LARGEST_L1 {
            return Err(FormatError::L1Long(entries));
        }
        let needed = geometry.l1_entries(self.size);
        if u64::from(entries) < needed {
            return Err(FormatError::L1Short { entries, needed });
        }
        if !self.may_have_table_at(self.l1_offset) {
            return Err(FormatError::L1Place(self.l1_offset));
        }
        Ok(())
    }

    fn may_have_table_at(&self, offset: u64) -> bool {
        let aligned = offset.is_multiple_of(self.geometry.cluster_size());
        aligned && offset != 0 && offset >> OFFSET_BITS == 0
    }

    /// Checks that this crate may write the image.
    ///
    /// # Errors
    /// [`FormatError`] when the image can only be read.
    pub fn check_writable(&self) -> Result<(), FormatError> {
        if self.incompatible & CORRUPT != 0 {
            return Err(FormatError::Corrupt);
        }
        if self.geometry.version < 3 {
            return Err(FormatError::Old);
        }
        if self.snapshots > 0 {
            return Err(FormatError::Snapshots(self.snapshots));
        }
        if self.has_bitmaps {
            return Err(FormatError::Bitmaps);
        }
        // Refcounts narrower than a byte share their bytes with neighbouring refcounts.
        if self.geometry.refcount_order < 3 {
            return Err(FormatError::NarrowRefcounts(self.geometry.refcount_order));
        }
        // A reader needs no refcounts.
        let clusters = u64::from(self.reftable_clusters);
        if clusters == 0 || clusters > (LARGEST_REFTABLE >> self.geometry.cluster_bits).max(1) {
            return Err(FormatError::Reftable(self.reftable_clusters));
        }
        if !self.may_have_table_at(self.reftable_offset) {
            return Err(FormatError::ReftablePlace(self.reftable_offset));
        }
        Ok(())
    }

    /// Returns whether refcounts may be wrong because the last process that wrote the image did not
    /// close it cleanly.
    pub fn is_dirty(&self) -> bool {
        self.incompatible & DIRTY != 0
    }
}

fn check_features(incompatible: u64) -> Result<(), FormatError> {
    if incompatible & EXTERNAL_DATA != 0 {
        return Err(FormatError::Feature(
            "an external data file; convert it with: qemu-img convert -O qcow2",
        ));
    }
    if incompatible & EXTENDED_L2 != 0 {
        return Err(FormatError::Feature(
            "extended L2 entries (subclusters); convert it with: qemu-img convert -O qcow2 -o extended_l2=off",
        ));
    }
    let unknown = incompatible & !(DIRTY | CORRUPT | EXTERNAL_DATA | COMPRESSION | EXTENDED_L2);
    match unknown {
        0 => Ok(()),
        bits => Err(FormatError::UnknownFeature(bits.trailing_zeros())),
    }
}

/// Parses the name of the backing file.
fn backing(first: &[u8], offset: u64, len: u32) -> Result<Option<String>, FormatError> {
    if offset == 0 || len == 0 {
        return Ok(None);
    }
    let outside = FormatError::BackingName { offset, len };
    let (Ok(start), Ok(length)) = (usize::try_from(offset), usize::try_from(len)) else {
        return Err(outside);
    };
    let name = first.get(start..).and_then(|rest| rest.get(..length));
    let Some(name) = name.filter(|_| length <= MAX_NAME_LEN) else {
        return Err(outside);
    };
    // A zero byte ends the name, and an empty name stands for no backing file, as in QEMU.
    let name = name.split(|byte| *byte == 0).next().unwrap_or_default();
    let name = std::str::from_utf8(name).map_err(|_| FormatError::BackingText)?;
    Ok((!name.is_empty()).then(|| name.to_owned()))
}

#[derive(Default)]
struct Extensions {
    backing_format: Option<String>,
    bitmaps: bool,
}

/// Parses the extensions in the first bytes of an image, from offset `at` on.
fn extensions(area: &[u8], mut at: usize) -> Result<Extensions, FormatError> {
    let area = Fields(area);
    let mut found = Extensions::default();
    // Room for another one is not needed where the area ends.
    while at + 8 <= area.0.len() {
        let (kind, len) = (area.u32(at)?, area.u32(at + 4)? as usize);
        if kind == EXTENSION_END {
            break;
        }
        let data = area.0.get(at + 8..).and_then(|rest| rest.get(..len));
        let data = data.ok_or(FormatError::Extension)?;
        match kind {
            EXTENSION_BACKING_FORMAT => {
                let text = std::str::from_utf8(data).map_err(|_| FormatError::BackingText)?;
                found.backing_format = Some(text.to_owned());
            }
            EXTENSION_BITMAPS => found.bitmaps = true,
            _ => {}
        }
        at += 8 + len.next_multiple_of(8);
    }
    Ok(found)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns a header of version 3 for 1 GiB in clusters of 64 KiB, as QEMU writes it.
    fn header() -> Vec<u8> {
        let mut bytes = vec![0; 1 << 16];
        let mut put = |at: usize, value: &[u8]| bytes[at..at + value.len()].copy_from_slice(value);
        put(0, MAGIC);
        put(4, &3u32.to_be_bytes());
        put(20, &16u32.to_be_bytes());
        put(24, &(1u64 << 30).to_be_bytes());
        put(36, &2u32.to_be_bytes());
        put(40, &0x30000u64.to_be_bytes());
        put(48, &0x10000u64.to_be_bytes());
        put(56, &1u32.to_be_bytes());
        put(96, &4u32.to_be_bytes());
        put(100, &112u32.to_be_bytes());
        bytes
    }

    fn with(at: usize, value: &[u8]) -> Result<Header, FormatError> {
        let mut bytes = header();
        bytes[at..at + value.len()].copy_from_slice(value);
        Header::parse(&bytes)
    }

    #[test]
    fn header_is_parsed() {
        let read = Header::parse(&header()).unwrap();
        assert_eq!((read.size, read.l1_entries), (1 << 30, 2));
        assert_eq!(
            (read.geometry.table_bits(), read.geometry.refcount_bits()),
            (13, 15)
        );
        assert_eq!((read.backing, read.backing_format), (None, None));
        for short in [0, 3, 4, 71, 103, 104] {
            assert_eq!(
                Header::parse(&header()[..short]),
                Err(FormatError::Short),
                "{short}"
            );
        }
    }

    #[test]
    fn unsupported_header_is_refused_with_reason() {
        let word = |at, value: &[u8]| with(at, value).unwrap_err().to_string();
        for (at, value, expected) in [
            (0, &b"QED\0"[..], "not a qcow2 image"),
            (4, &4u32.to_be_bytes(), "version 4"),
            (20, &8u32.to_be_bytes(), "2^8 bytes"),
            (20, &22u32.to_be_bytes(), "2^22 bytes"),
            (32, &1u32.to_be_bytes(), "encrypted"),
            (72, &4u64.to_be_bytes(), "external data file"),
            (72, &16u64.to_be_bytes(), "extended_l2=off"),
            (72, &(1u64 << 40).to_be_bytes(), "bit 40"),
            (104, &[1], "zstd"),
            (104, &[7], "type 7"),
            (96, &7u32.to_be_bytes(), "2^7 bits"),
            (100, &100u32.to_be_bytes(), "invalid length 100"),
            (100, &(1u32 << 17).to_be_bytes(), "invalid length"),
            (24, &0u64.to_be_bytes(), "size of 0"),
            (24, &u64::MAX.to_be_bytes(), "impossible size"),
            (36, &1u32.to_be_bytes(), "instead of the 2"),
            (36, &u32::MAX.to_be_bytes(), "more than 32 MiB"),
            (40, &0x30100u64.to_be_bytes(), "L1 table at byte"),
            (40, &0u64.to_be_bytes(), "L1 table at byte 0"),
        ] {
            let text = word(at, value);
            assert!(text.contains(expected), "{at}: {text}");
        }
    }

    #[test]
    fn read_only_reason_is_reported() {
        let check = |at, value: &[u8]| {
            with(at, value)
                .unwrap()
                .check_writable()
                .unwrap_err()
                .to_string()
        };
        for (at, value, expected) in [
            (72, &2u64.to_be_bytes()[..], "corrupt"),
            (60, &1u32.to_be_bytes(), "snapshot -d"),
            (88, &1u64.to_be_bytes(), "bitmaps"),
            (96, &2u32.to_be_bytes(), "4 bits"),
            (4, &2u32.to_be_bytes(), "compat=1.1"),
            (48, &(1u64 << 60).to_be_bytes(), "refcount table at byte"),
            (48, &0x10100u64.to_be_bytes(), "refcount table at byte"),
            (56, &0u32.to_be_bytes(), "refcount table of 0"),
            (56, &(1u32 << 20).to_be_bytes(), "more than 8 MiB"),
        ] {
            let text = check(at, value);
            assert!(text.contains(expected), "{at}: {text}");
        }
        let dirty = with(72, &1u64.to_be_bytes()).unwrap();
        assert!(dirty.is_dirty() && dirty.check_writable().is_ok());
    }

    #[test]
    fn backing_file_and_format_are_parsed() {
        let mut bytes = header();
        let mut put = |at: usize, value: &[u8]| bytes[at..at + value.len()].copy_from_slice(value);
        put(112, &EXTENSION_BACKING_FORMAT.to_be_bytes());
        put(116, &5u32.to_be_bytes());
        put(120, b"qcow2");
        put(128, &0x1234_5678u32.to_be_bytes());
        put(132, &4u32.to_be_bytes());
        put(8, &200u64.to_be_bytes());
        put(16, &8u32.to_be_bytes());
        put(200, b"base.img");
        let read = Header::parse(&bytes).unwrap();
        assert_eq!(read.backing.as_deref(), Some("base.img"));
        assert_eq!(read.backing_format.as_deref(), Some("qcow2"));
        for (at, value, expected) in [
            (
                16,
                &1024u32.to_be_bytes()[..],
                FormatError::BackingName {
                    offset: 200,
                    len: 1024,
                },
            ),
            (
                8,
                &(1u64 << 63).to_be_bytes(),
                FormatError::BackingName {
                    offset: 1 << 63,
                    len: 8,
                },
            ),
            (200, &[0xff], FormatError::BackingText),
            (132, &1000u32.to_be_bytes(), FormatError::Extension),
        ] {
            let mut bytes = bytes.clone();
            bytes[at..at + value.len()].copy_from_slice(value);
            assert_eq!(Header::parse(&bytes), Err(expected), "{at}");
        }
        // A zero byte ends the name, and an empty name stands for no backing file, as in QEMU.
        for (at, value, expected) in [
            (203, &[0][..], Some("bas")),
            (200, &[0], None),
            (16, &0u32.to_be_bytes(), None),
        ] {
            let mut bytes = bytes.clone();
            bytes[at..at + value.len()].copy_from_slice(value);
            let read = Header::parse(&bytes).unwrap();
            assert_eq!(read.backing.as_deref(), expected, "{at}");
        }
    }
}
