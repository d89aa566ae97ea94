//! Row ids of candidates (rule N2).
