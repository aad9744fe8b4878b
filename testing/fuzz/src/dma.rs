//! A hostile guest's data pointers: PRP and SGL walks through a small, partly mapped address space.

use dma::{Access, DmaMap, Memory, Prot, SegmentList, prp, sgl};

/// Pages of the address space; those behind are unmapped.
const PAGES: u64 = 16;
/// The unit of the address space.
const PAGE: u64 = 4096;
/// More than any command moves.
const MAX_LEN: u64 = 4 << 20;

/// Takes bytes from the input; zeroes when it is used up.
struct Input<'a>(&'a [u8]);

impl Input<'_> {
    fn bytes<const N: usize>(&mut self) -> [u8; N] {
        let mut out = [0; N];
        let (now, rest) = self.0.split_at(N.min(self.0.len()));
        for (to, from) in out.iter_mut().zip(now) {
            *to = *from;
        }
        self.0 = rest;
        out
    }

    fn u64(&mut self) -> u64 {
        u64::from_le_bytes(self.bytes())
    }

    /// An SGL descriptor that is often of a known type and of a sensible length.
    fn descriptor(&mut self) -> [u8; 16] {
        let address = self.address();
        let [kind, raw, unit] = self.bytes();
        let kind = [0x00, 0x00, 0x20, 0x30, raw][usize::from(kind % 5)];
        let length = match unit % 4 {
            0 => self.u64(),
            1 => u64::from(raw) * 16,
            2 => u64::from(raw % 16) * 16,
            _ => u64::from(raw % 4) * 512,
        };
        let word = u128::from(address) | u128::from(length as u32) << 64 | u128::from(kind) << 120;
        word.to_le_bytes()
    }

    /// An address that is often inside the space.
    fn address(&mut self) -> u64 {
        let [kind] = self.bytes();
        let at = self.u64();
        match kind % 4 {
            0 => at,
            1 => at % (PAGES * PAGE),
            2 => (at % (PAGES * PAGE)) & !7,
            _ => (at % PAGES) * PAGE,
        }
    }
}

/// Walks a PRP pair and an SGL descriptor over memory of the guest's making.
///
/// # Panics
/// When a walk that succeeded does not describe exactly the command's data in mapped memory.
pub fn prp_sgl(data: &[u8]) {
    walks(data);
}

/// Runs both walks; returns whether the PRP and the SGL walk succeeded.
fn walks(data: &[u8]) -> [bool; 2] {
    let mut input = Input(data);
    let Ok(memory) = Memory::anonymous((PAGES * PAGE) as usize) else {
        return [false; 2];
    };
    let mut map = DmaMap::new();
    let kinds: [u8; PAGES as usize] = input.bytes();
    let mut mapped = false;
    for (page, kind) in kinds.into_iter().enumerate() {
        let iova = page as u64 * PAGE;
        let prot = Prot {
            read: kind & 1 == 0,
            write: kind & 2 == 0,
        };
        // Mostly there, now and then without memory or not mapped, and somewhere else in the file.
        let place = u64::from(kind >> 4) * PAGE;
        let backing = (kind & 0x0C != 0x0C).then(|| (memory.clone(), place));
        if kind & 0x0F != 0x0E {
            assert_eq!(map.map(iova, PAGE, backing, prot), Ok(()));
            mapped = true;
        }
    }
    let [scale] = input.bytes();
    // Lengths of all magnitudes; half of them in blocks, as descriptors often are.
    let mask = if scale & 0x80 == 0 { u64::MAX } else { !511 };
    let len = (input.u64() % (MAX_LEN >> (scale % 17))) & mask;
    let [direction, shift] = input.bytes();
    let access = if direction & 1 == 0 {
        Access::Read
    } else {
        Access::Write
    };
    let (prp1, prp2) = (input.address(), input.address());
    let descriptor = input.descriptor();
    // The rest of the input is guest memory: bytes, SGL descriptors or PRP entries.
    let mut at = 0;
    while at < memory.len() && !input.0.is_empty() {
        let entry = match direction & 6 {
            0 => input.bytes(),
            2 => input.descriptor(),
            _ => (u128::from(input.address()) | u128::from(input.address()) << 64).to_le_bytes(),
        };
        assert_eq!(memory.write(at, &entry), Ok(()));
        at += entry.len();
    }

    let mut list = SegmentList::new();
    list.begin(&map);
    let prp = prp::walk(
        &map,
        prp1,
        prp2,
        len,
        PAGE << (shift % 3),
        access,
        &mut list,
    );
    check(&list, &memory, prp.is_ok().then_some(len));
    list.begin(&map);
    let sgl = sgl::walk(&map, descriptor, len, access, &mut list);
    check(&list, &memory, sgl.is_ok().then_some(len));
    map.unmap_all();
    // Where nothing was mapped, nothing can be in use.
    assert_eq!(map.quiesced(), !mapped);
    list.clear();
    assert!(map.quiesced());
    [prp.is_ok(), sgl.is_ok()]
}

/// Every segment lies inside the memory, and together they have the length that was asked.
fn check(list: &SegmentList, memory: &Memory, len: Option<u64>) {
    let Some(whole) = memory.segment(0, memory.len()) else {
        return;
    };
    let start = whole.as_ptr().addr();
    let mut sum = 0;
    for segment in list.segments() {
        assert!(!segment.is_empty());
        let at = segment.as_ptr().addr();
        assert!(
            at >= start
                && segment.len() <= whole.len()
                && at - start <= whole.len() - segment.len()
        );
        sum += segment.len() as u64;
    }
    assert_eq!(list.len_bytes(), sum);
    if let Some(len) = len {
        assert_eq!(sum, len);
    }
}

#[cfg(test)]
mod tests {
    /// Random inputs from a fixed seed, and an empty one; some of them must get through.
    #[test]
    fn random_data_pointers_are_walked() {
        super::prp_sgl(&[]);
        let mut chance = crate::chance::Chance::new();
        let mut through = [0; 2];
        for round in 0..4000 {
            let data = chance.bytes(64 + round % 1400);
            for (count, ok) in through.iter_mut().zip(super::walks(&data)) {
                *count += u32::from(ok);
            }
        }
        assert!(
            through.iter().all(|&count| count > 10),
            "{through:?} of 4000 succeeded"
        );
    }
}
