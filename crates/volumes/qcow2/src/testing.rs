//! Images for tests, created independently of the code under test.

use std::fs;
use std::path::Path;

/// Builder of an empty image: header, refcount table, its block, and L1 table, each in clusters of
/// its own.
pub struct EmptyImage<'a> {
    pub size: u64,
    pub cluster_bits: u32,
    pub refcount_order: u32,
    /// Name and format of the backing file, if the image has one.
    pub backing: Option<(&'a str, &'a str)>,
}

impl Default for EmptyImage<'_> {
    fn default() -> Self {
        Self {
            size: 8 << 20,
            cluster_bits: 16,
            refcount_order: 4,
            backing: None,
        }
    }
}

impl EmptyImage<'_> {
    /// Writes the image to the file at `path`.
    pub fn image(&self, path: &Path) {
        fs::write(path, self.bytes()).unwrap();
    }

    pub fn bytes(&self) -> Vec<u8> {
        let cluster = 1usize << self.cluster_bits;
        let tables = self.size.div_ceil((cluster * cluster / 8) as u64);
        let l1 = (tables as usize * 8).div_ceil(cluster);
        let used = 3 + l1;
        let mut bytes = vec![0; used * cluster];
        let mut put = |at: usize, value: &[u8]| bytes[at..at + value.len()].copy_from_slice(value);
        put(0, b"QFI\xfb");
        put(4, &3u32.to_be_bytes());
        put(20, &self.cluster_bits.to_be_bytes());
        put(24, &self.size.to_be_bytes());
        put(36, &(tables as u32).to_be_bytes());
        put(40, &(3 * cluster as u64).to_be_bytes());
        put(48, &(cluster as u64).to_be_bytes());
        put(56, &1u32.to_be_bytes());
        put(96, &self.refcount_order.to_be_bytes());
        put(100, &104u32.to_be_bytes());
        if let Some((name, format)) = self.backing {
            put(104, &0xe279_2acau32.to_be_bytes());
            put(108, &(format.len() as u32).to_be_bytes());
            put(112, format.as_bytes());
            let at = 112 + format.len().next_multiple_of(8) + 8;
            put(8, &(at as u64).to_be_bytes());
            put(16, &(name.len() as u32).to_be_bytes());
            put(at, name.as_bytes());
        }
        put(cluster, &(2 * cluster as u64).to_be_bytes());
        let width = 1usize << (self.refcount_order - 3);
        for n in 0..used {
            put(2 * cluster + (n + 1) * width - 1, &[1]);
        }
        bytes
    }
}

/// Result of a naive read of an image: references and refcount of each cluster, and the contents of
/// the disk.
pub struct ImageSummary {
    pub leaked: usize,
    pub wrong: Vec<String>,
    pub dirty: bool,
    pub disk: Vec<u8>,
}

fn be(bytes: &[u8], at: usize, len: usize) -> u64 {
    let field = bytes.get(at..at + len).unwrap_or(&[]);
    field
        .iter()
        .fold(0, |value, &byte| value << 8 | u64::from(byte))
}

/// Reads an image without compressed clusters, on top of the contents of its backing file.
pub fn see(image: &[u8], below: &[u8]) -> ImageSummary {
    let bits = be(image, 20, 4) as u32;
    let cluster = 1usize << bits;
    let width = 1usize << (be(image, 96, 4) - 3);
    let size = be(image, 24, 8) as usize;
    let (l1, l1_len) = (be(image, 40, 8) as usize, be(image, 36, 4) as usize);
    let (reftable, reftable_len) = (
        be(image, 48, 8) as usize,
        be(image, 56, 4) as usize * cluster,
    );
    let mut used = std::collections::BTreeMap::<usize, u64>::new();
    let mut wrong = Vec::new();
    let mut add = |at: usize, len: usize| {
        for n in at >> bits..(at + len).div_ceil(cluster) {
            *used.entry(n).or_default() += 1;
        }
    };
    add(0, cluster);
    add(l1, (l1_len * 8).max(1));
    add(reftable, reftable_len);
    for entry in 0..reftable_len / 8 {
        match be(image, reftable + entry * 8, 8) as usize {
            0 => {}
            block => add(block, cluster),
        }
    }
    let mut disk = below.to_vec();
    disk.resize(size, 0);
    for index in 0..l1_len {
        let table = be(image, l1 + index * 8, 8) & !(1 << 63);
        if table == 0 {
            continue;
        }
        add(table as usize, cluster);
        for n in 0..cluster / 8 {
            let entry = be(image, table as usize + n * 8, 8);
            let at = (index * (cluster / 8) + n) << bits;
            let host = (entry & 0x00ff_ffff_ffff_fe00) as usize;
            if host != 0 {
                add(host, cluster);
            }
            if entry == 0 || at >= size {
                continue;
            }
            let len = cluster.min(size - at);
            for byte in 0..len {
                disk[at + byte] = match entry & 1 {
                    1 => 0,
                    _ => image.get(host + byte).copied().unwrap_or(0),
                };
            }
        }
    }
    let count = |n: usize| {
        let per_block = cluster / width;
        let block = be(image, reftable + n / per_block * 8, 8) as usize;
        match block {
            0 => 0,
            block => be(image, block + n % per_block * width, width),
        }
    };
    let mut leaked = 0;
    let last = used
        .keys()
        .next_back()
        .copied()
        .unwrap_or(0)
        .max(image.len() >> bits);
    for n in 0..=last {
        let (is, counted) = (used.get(&n).copied().unwrap_or(0), count(n));
        match counted.cmp(&is) {
            std::cmp::Ordering::Greater => leaked += 1,
            std::cmp::Ordering::Less => wrong.push(format!("cluster {n}: {is} uses, {counted}")),
            std::cmp::Ordering::Equal if is > 1 => wrong.push(format!("cluster {n}: shared")),
            std::cmp::Ordering::Equal => {}
        }
    }
    ImageSummary {
        leaked,
        wrong,
        dirty: be(image, 72, 8) & 1 != 0,
        disk,
    }
}
