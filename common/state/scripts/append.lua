-- An event that belongs to no other script.
local seen = replayed()
if seen then return seen end
event(a.kind, nil, a.fields)
return done({appended = true})
