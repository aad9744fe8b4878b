//! PRP entries and lists (NVMe Base 2.1, 4.3.1).

use crate::GuestMemory;
use anyhow::Result;

/// Returns the maximum size in bytes of the PRP list of a transfer, a multiple of the page size.
pub fn prp_list_bytes(page: u64, len: u64) -> u64 {
    // Each page of a list has a pointer to the next one.
    page * ((len / page + 1) / (page / 8 - 1) + 1)
}

/// Returns PRP entries 1 and 2 for `len` bytes from an IOVA on. If a PRP list is needed, it is
/// written to `list` and the following pages.
pub fn prps(
    memory: &impl GuestMemory,
    page: u64,
    iova: u64,
    len: u64,
    list: u64,
) -> Result<(u64, u64)> {
    let first = (page - iova % page).min(len);
    let pages = (first..len).step_by(page as usize).map(|at| iova + at);
    let pages: Vec<u64> = pages.collect();
    match pages[..] {
        [] => return Ok((iova, 0)),
        [one] => return Ok((iova, one)),
        _ => {}
    }
    let (mut at, mut left) = (list, pages.as_slice());
    while !left.is_empty() {
        let room = ((page - at % page) / 8) as usize;
        let here = if left.len() > room {
            room - 1
        } else {
            left.len()
        };
        let (now, rest) = left.split_at(here);
        let next = at - at % page + page;
        let pointer = (!rest.is_empty()).then_some(next);
        let entries = now.iter().copied().chain(pointer);
        memory.write(at, &entries.flat_map(u64::to_le_bytes).collect::<Vec<u8>>())?;
        (at, left) = (next, rest);
    }
    Ok((iova, list))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Windows;
    use dma::Memory;

    fn entry(memory: &Windows, iova: u64) -> u64 {
        let mut data = [0; 8];
        memory.read(iova, &mut data).unwrap();
        u64::from_le_bytes(data)
    }

    #[test]
    fn prp_list_continues_in_next_page() {
        let memory = Windows::new(0, Memory::anonymous(64 << 10).unwrap());
        let of = |iova, len, list| prps(&memory, 4096, iova, len, list).unwrap();
        assert_eq!(of(0x10_0200, 512, 0x1000), (0x10_0200, 0));
        assert_eq!(of(0x10_0200, 4096, 0x1000), (0x10_0200, 0x10_1000));
        // Three entries behind the first page, with room for two: one, and a pointer.
        assert_eq!(of(0x10_0000, 4 * 4096, 0x1ff0), (0x10_0000, 0x1ff0));
        assert_eq!(entry(&memory, 0x1ff0), 0x10_1000);
        assert_eq!(entry(&memory, 0x1ff8), 0x2000);
        assert_eq!(entry(&memory, 0x2000), 0x10_2000);
        assert_eq!(entry(&memory, 0x2008), 0x10_3000);
        // An exact fit has no pointer.
        assert_eq!(of(0x10_0000, 3 * 4096, 0x1ff0), (0x10_0000, 0x1ff0));
        assert_eq!(entry(&memory, 0x1ff8), 0x10_2000);
        let pages = prp_list_bytes(4096, 1023 * 4096) / 4096;
        assert!((2..=3).contains(&pages), "{pages}");
    }
}
