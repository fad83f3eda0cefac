// A page that is opened from a disk may not read others, so the search shows titles alone there.
if (location.protocol === "file:") DOCUMENTATION_OPTIONS.SHOW_SEARCH_SUMMARY = false;
