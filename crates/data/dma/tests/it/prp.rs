//! The PRP walker against a naive one that reads entry by entry, on honest
//! lists and on corrupted ones.

use crate::common::{BOTH, PAGE, Space, assert_places};
use dma::{DmaError, PrpError, SegmentList, prp};
use proptest::prelude::*;

/// What a pair of PRPs describes, as (address, length) of each entry.
fn naive(
    space: &Space,
    prp1: u64,
    prp2: u64,
    len: u64,
    page: u64,
) -> Result<Vec<(u64, u64)>, PrpError> {
    let mut pieces: Vec<(u64, u64)> = Vec::new();
    let mut left = len;
    let mut data = |prp: u64, first: bool, left: &mut u64| {
        let offset = prp % page;
        let aligned = if first {
            offset.is_multiple_of(4)
        } else {
            offset == 0
        };
        if !aligned {
            return Err(PrpError::OffsetInvalid { prp });
        }
        let bytes = (page - offset).min(*left);
        space.pieces(prp, bytes)?;
        pieces.push((prp, bytes));
        *left -= bytes;
        Ok(())
    };
    if left == 0 {
        return Ok(pieces);
    }
    data(prp1, true, &mut left)?;
    if left == 0 {
        return Ok(pieces);
    }
    if left <= page {
        data(prp2, false, &mut left)?;
        return Ok(pieces);
    }
    if !prp2.is_multiple_of(8) {
        return Err(PrpError::OffsetInvalid { prp: prp2 });
    }
    let mut at = prp2;
    loop {
        let entry = u64::from_le_bytes(space.bytes(at)?);
        let in_last_slot = at % page == page - 8;
        if in_last_slot && left > page {
            if !entry.is_multiple_of(page) {
                return Err(PrpError::OffsetInvalid { prp: entry });
            }
            at = entry;
            continue;
        }
        data(entry, false, &mut left)?;
        if left == 0 {
            return Ok(pieces);
        }
        at += 8;
    }
}

fn check(space: &Space, prp1: u64, prp2: u64, len: u64, page: u64) -> Result<(), PrpError> {
    let expected = naive(space, prp1, prp2, len, page);
    for access in BOTH {
        let mut list = SegmentList::new();
        list.begin(&space.map);
        let got = prp::walk(&space.map, prp1, prp2, len, page, access, &mut list);
        match &expected {
            Ok(pieces) => {
                assert_eq!(got, Ok(()));
                let pieces: Vec<(usize, usize)> = pieces
                    .iter()
                    .flat_map(|&(at, len)| space.pieces(at, len).unwrap())
                    .collect();
                assert_places(&list, &space.memory, &pieces);
            }
            Err(error) => assert_eq!(got, Err(*error)),
        }
    }
    expected.map(drop)
}

/// A request as a host makes it: which pages of the space are data, which are lists,
/// and where everything starts.
#[derive(Clone, Debug)]
struct Request {
    base: u64,
    places: Vec<Option<usize>>,
    data: Vec<prop::sample::Index>,
    lists: Vec<prop::sample::Index>,
    first_offset: u64,
    list_slot: u64,
    len: u64,
}

const PAGES: usize = 64;

fn request(last_slots: bool) -> impl Strategy<Value = Request> {
    let slot = if last_slots { 505..512u64 } else { 0..512u64 };
    (
        prop_oneof![
            Just(0),
            Just(0x1_0000_0000),
            Just(0u64.wrapping_sub(PAGES as u64 * PAGE))
        ],
        Just((0..PAGES).collect::<Vec<_>>()).prop_shuffle(),
        prop::collection::vec(any::<prop::sample::Index>(), 1300),
        prop::collection::vec(any::<prop::sample::Index>(), 8),
        (0..1024u64).prop_map(|i| i * 4),
        slot,
        prop_oneof![4 => 0..40 * PAGE, 1 => 0..1200 * PAGE],
        any::<bool>(),
    )
        .prop_map(
            |(base, places, data, lists, first_offset, list_slot, len, to_the_end)| Request {
                base,
                // Every other page keeps its place, so that there is something to merge.
                places: places
                    .into_iter()
                    .enumerate()
                    .map(|(i, p)| Some(if p % 2 == 0 { i } else { p }))
                    .collect(),
                data,
                lists,
                first_offset,
                list_slot,
                // Often the data ends with a page, where one more entry, or one
                // less, would be easy to take.
                len: if to_the_end {
                    len - len % PAGE + PAGE - first_offset
                } else {
                    len
                },
            },
        )
}

impl Request {
    /// Writes the lists; returns the space and the two PRPs. List pages are taken from the last
    /// eight pages of the space, one each; data from the others, in any order and repeatedly.
    fn build(&self) -> (Space, u64, u64) {
        let mut places = self.places.clone();
        for (i, place) in places.iter_mut().enumerate().skip(PAGES - 8) {
            *place = Some(PAGES + i);
        }
        let space = Space::new(self.base, places);
        let page_at = |i: usize| self.base.wrapping_add(i as u64 * PAGE);
        let mut data = self
            .data
            .iter()
            .map(|index| page_at(index.index(PAGES - 8)));
        let prp1 = data.next().unwrap() + self.first_offset;
        let left = self.len.saturating_sub(PAGE - self.first_offset);
        if left <= PAGE {
            let prp2 = data.next().unwrap();
            return (space, prp1, prp2);
        }
        let mut lists = self
            .lists
            .iter()
            .enumerate()
            .map(|(i, _)| page_at(PAGES - 8 + i));
        let mut at = lists.next().unwrap() + self.list_slot * 8;
        let prp2 = at;
        let mut entries = left.div_ceil(PAGE);
        while entries > 0 {
            let last_slot = at % PAGE == PAGE - 8;
            let entry = if last_slot && entries > 1 {
                lists.next().unwrap()
            } else {
                data.next().unwrap()
            };
            space.map.write(at, &entry.to_le_bytes()).unwrap();
            if last_slot && entries > 1 {
                at = entry;
            } else {
                at += 8;
                entries -= 1;
            }
        }
        (space, prp1, prp2)
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 1000, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn valid_prp_lists_are_walked(request in request(false)) {
        let (space, prp1, prp2) = request.build();
        prop_assert_eq!(check(&space, prp1, prp2, request.len, PAGE), Ok(()));
    }

    #[test]
    fn valid_prp_lists_near_page_end_are_walked(request in request(true)) {
        let (space, prp1, prp2) = request.build();
        prop_assert_eq!(check(&space, prp1, prp2, request.len, PAGE), Ok(()));
    }

    #[test]
    fn corrupted_prp_lists_are_refused(
        mut request in request(true),
        holes in prop::collection::vec(0..PAGES, 0..3),
        wrong in prop::collection::vec((0..40u64, prop_oneof![
            any::<u64>(),
            (0..PAGES as u64 * 2).prop_map(|i| i * PAGE),
            (0..PAGES as u64 * PAGE),
        ]), 0..4),
        flips in (0..64u32, 0..64u32, any::<bool>(), any::<bool>()),
    ) {
        for hole in holes {
            request.places[hole.min(PAGES - 9)] = None;
        }
        // The lists themselves are in pages that `build` puts into place;
        // only data pages are holes.
        let (space, mut prp1, mut prp2) = request.build();
        for (slot, entry) in wrong {
            let at = (prp2 & !7).wrapping_add(slot * 8);
            let _ = space.map.write(at, &entry.wrapping_add(request.base).to_le_bytes());
        }
        if flips.2 { prp1 ^= 1 << flips.0; }
        if flips.3 { prp2 ^= 1 << flips.1; }
        let _ = check(&space, prp1, prp2, request.len, PAGE);
    }

    #[test]
    fn prp_lists_with_larger_pages_are_walked(
        shift in 1..4u32,
        prp1 in (0..16 * PAGE).prop_map(|a| a & !3),
        entries in prop::collection::vec(0..8u64, 20),
        slot in 0..40u64,
        len in 0..600_000u64,
    ) {
        // One linear space, so that a page of the device may be several of the model's.
        let space = Space::new(0, (0..128).map(Some).collect());
        let page = PAGE << shift;
        let list = 64 * PAGE + page - 8 * (slot + 1);
        let chain = 96 * PAGE;
        for (i, entry) in entries.iter().enumerate() {
            let _ = space.map.write(list + i as u64 * 8, &(entry * page).to_le_bytes());
            let _ = space.map.write(chain + i as u64 * 8, &(entry * page).to_le_bytes());
        }
        space.map.write(64 * PAGE + page - 8, &chain.to_le_bytes()).unwrap();
        let _ = check(&space, prp1, list, len, page);
    }
}

#[test]
fn prp_offset_error_names_entry() {
    let space = Space::new(0, (0..8).map(Some).collect());
    let walk = |prp1, prp2, len| {
        let mut list = SegmentList::new();
        prp::walk(
            &space.map,
            prp1,
            prp2,
            len,
            PAGE,
            dma::Access::Write,
            &mut list,
        )
    };
    assert_eq!(
        walk(0x1002, 0, 16),
        Err(PrpError::OffsetInvalid { prp: 0x1002 })
    );
    assert_eq!(
        walk(0x1000, 0x2004, 8192),
        Err(PrpError::OffsetInvalid { prp: 0x2004 })
    );
    assert_eq!(
        walk(0x1000, 0x2004, 3 * 4096),
        Err(PrpError::OffsetInvalid { prp: 0x2004 })
    );
    assert_eq!(
        walk(0x1000, 0x8000, 3 * 4096),
        Err(PrpError::Dma(DmaError::Unmapped { iova: 0x8000 }))
    );
    // PRP2 is not looked at when PRP1 describes all.
    assert_eq!(walk(0x1ffc, u64::MAX, 4), Ok(()));
    assert_eq!(walk(u64::MAX, u64::MAX, 0), Ok(()));
    space.map.write(0x2ff8, &0x3008u64.to_le_bytes()).unwrap();
    assert_eq!(
        walk(0x1000, 0x2ff8, 3 * 4096),
        Err(PrpError::OffsetInvalid { prp: 0x3008 })
    );
}

/// A list with a last entry that points to itself: the walk ends with the data.
#[test]
fn circular_prp_list_ends() {
    let space = Space::new(0, (0..4).map(Some).collect());
    for slot in 0..512 {
        let entry: u64 = if slot == 511 { 0x1000 } else { 0x2000 };
        space
            .map
            .write(0x1000 + slot * 8, &entry.to_le_bytes())
            .unwrap();
    }
    let mut list = SegmentList::new();
    let len = 5000 * PAGE;
    prp::walk(
        &space.map,
        0,
        0x1000,
        len,
        PAGE,
        dma::Access::Write,
        &mut list,
    )
    .unwrap();
    assert_eq!(list.len_bytes(), len);
}
