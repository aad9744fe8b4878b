//! Guest memory as a device sees it: IOVA map, PRP and SGL walking, bounded copies.
